"""The gated RMS norm: PyTorch and Triton kernels."""
