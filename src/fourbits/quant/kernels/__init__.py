"""Quantization on NVIDIA GPUs: Triton kernels and their launches."""
