"""Reading of GGUF files and their conversion to transformers' layout, for Llama targets."""
