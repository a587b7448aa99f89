"""What the training recipe of a head is made of: features, packing, losses, optimization."""
