"""Draws without filters from rows of logits that ranks have shares of, without gathering them."""
