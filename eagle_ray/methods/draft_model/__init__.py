"""A small causal LM as the drafter."""
