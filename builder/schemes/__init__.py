"""How quantized weights are read from a checkpoint: one module per scheme, listed in `table.py`."""
