"""The command that trains a head: its data, its loop, its files."""
