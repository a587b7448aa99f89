"""Drafters: they propose candidate tokens as trees, and the budget decides which are verified."""
