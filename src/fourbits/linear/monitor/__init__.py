"""Health of quantized training: what samples of a step's operands and GEMMs show, and alarms about it."""
