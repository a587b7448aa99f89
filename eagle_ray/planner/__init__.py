"""Planners: how deep and wide the next step drafts, and how many rows it verifies."""
