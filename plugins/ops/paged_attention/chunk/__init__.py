"""Context chunks, and the conversion of their tiles to 16 bits."""
