"""DFlash: heads that draft a block of tokens in one pass."""
