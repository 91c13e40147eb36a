"""Weights of 16 or 32 bits, as the model has them."""
