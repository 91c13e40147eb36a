"""How weights are quantized: one module per scheme, and `table.py`."""
