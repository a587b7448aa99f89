"""GGUF files: their blocks, configs and tokenizers, under transformers' names of tensors and keys."""
