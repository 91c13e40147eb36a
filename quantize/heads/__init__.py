"""Draft heads of a target, quantized on its hidden rows."""
