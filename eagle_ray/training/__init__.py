"""Making drafts better: the embedded pair from nothing; EAGLE, Medusa and Hydra heads for a given target."""
