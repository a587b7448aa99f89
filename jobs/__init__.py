"""Scripts for `ray job submit` and from the command line."""
