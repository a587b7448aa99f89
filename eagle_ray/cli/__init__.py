"""The eagle-ray command: main.py and one module per command."""
