"""Sampling keyed by (seed, position, token), and what controls and grammars do to logits."""
