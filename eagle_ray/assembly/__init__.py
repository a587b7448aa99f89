"""What is decided before an engine runs: how many workers there are, and how much memory each plans for what."""
