"""The best id of each row of logits that ranks have shares of, without gathering them."""
