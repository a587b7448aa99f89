"""The eagle-ray command: main.py, modules with the commands' flags, and those that do the work."""
