"""Sampling with noise keyed by (seed, position, token), and the controls and grammars that adjust logits."""
