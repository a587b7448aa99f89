"""Medusa and Hydra: a head for each level of the tree."""
