"""The specification of quantization in plain torch."""
