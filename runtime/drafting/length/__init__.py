"""How many tokens to draft: a fixed number, or the fastest by acceptance and cost."""
