"""EAGLE: a head that drafts from the features of the target (EAGLE-1, -2 and -3)."""
