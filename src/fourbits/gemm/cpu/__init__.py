"""GEMMs of quantized operands in plain torch."""
