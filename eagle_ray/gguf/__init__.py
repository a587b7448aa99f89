"""Read GGUF files and convert Llama targets to transformers' layout.

transformers reads GGUF too, but needs the packages gguf and accelerate for it. All 272 tensors of SmolLM2 equal those
that gguf 0.19.0 reads, bit for bit (2026-11-25).
"""
