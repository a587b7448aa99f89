"""L3: the only room with time and mutation. No Ray, no tokenizer, no I/O."""
