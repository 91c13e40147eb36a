"""Weight schemes: how linears' weights are stored, packed and multiplied. `table.py` lists them."""
