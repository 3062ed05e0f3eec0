"""Which operand of which GEMM gets which format, and the linear layer that obeys it."""
