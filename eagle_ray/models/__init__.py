"""L1: weights, key/value caches and attention. Knows tensors and checkpoints, not requests."""
