"""GEMMs of quantized operands in Triton."""
