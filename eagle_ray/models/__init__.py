"""The target on its device: checkpoints and their loading, quantised weights, decoder layers, graphs of passes."""
