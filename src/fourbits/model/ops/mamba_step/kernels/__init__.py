"""Triton kernels and their launches; imported by op.py only."""
