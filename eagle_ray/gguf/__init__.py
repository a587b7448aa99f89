"""Convert Llama targets from GGUF to transformers' layout."""
