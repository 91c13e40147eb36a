"""Schemes: how linear layers' weights are stored, packed and multiplied. `table.py` lists them."""
