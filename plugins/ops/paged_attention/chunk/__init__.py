"""Context chunks, and the tiles that are converted for them."""
