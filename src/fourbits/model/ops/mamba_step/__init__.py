"""One token of a Mamba-2 mixer with the state of earlier tokens: PyTorch and Triton kernels."""
