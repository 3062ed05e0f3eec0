"""GEMMs of quantized operands."""
