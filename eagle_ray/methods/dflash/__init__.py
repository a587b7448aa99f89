"""DFlash: a block of tokens in one pass."""
