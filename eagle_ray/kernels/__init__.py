"""Triton kernels for CUDA devices, each behind one function. triton is imported by whoever is about to use it."""
