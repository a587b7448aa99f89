"""Engines behind one protocol: what is above it answers requests, whichever engine does the work."""
