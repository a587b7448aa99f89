"""The eagle-ray command: `main` dispatches, the other modules define flags and do the work of the commands."""
