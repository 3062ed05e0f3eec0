"""From a tensor to a quantized operand, and back."""
