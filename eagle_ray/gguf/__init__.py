"""Read GGUF files: weights, configs and tokenizers, under transformers' names."""
