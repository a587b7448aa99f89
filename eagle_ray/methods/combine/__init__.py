"""Several methods in one tree, and a switch between them."""
