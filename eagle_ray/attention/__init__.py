"""Attention of packed rows over the KV cache: metadata and the PyTorch, C++ and Triton backends."""
