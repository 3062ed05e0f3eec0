"""GEMMs of quantized operands in FP64, the specification."""
