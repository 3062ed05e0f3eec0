"""Quantization on CPUs: the reference compiled, and C++."""
