"""A branch added to the residual stream, and the RMS norm of the sum: PyTorch and a Triton kernel."""
