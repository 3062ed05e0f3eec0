"""The SSD scan (state space duality) of Mamba-2: recurrence, chunks in PyTorch, and Triton kernels."""
