"""How quantized weights are read from a checkpoint: one module per scheme, and `table.py`."""
