"""Building blocks for training draft heads: features, packing, losses, optimization."""
