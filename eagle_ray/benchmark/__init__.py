"""L3: how fast engines are, beside each other. Knows engines and clocks; not rows, files or Ray."""
