"""Quantized linear layers: placement, the module, its operators and its state."""
