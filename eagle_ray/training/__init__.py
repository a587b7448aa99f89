"""Parts of a training recipe for heads: features, packing, losses, optimization."""
