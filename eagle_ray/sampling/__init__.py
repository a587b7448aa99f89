"""Sampling keyed by (seed, position, token), and the calibration of drafted probabilities."""
