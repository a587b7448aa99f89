"""Triton kernels for CUDA devices, each behind one function. A module imports triton only when it uses it."""
