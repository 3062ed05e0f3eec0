"""The causal convolution and its SiLU: PyTorch and Triton kernels."""
