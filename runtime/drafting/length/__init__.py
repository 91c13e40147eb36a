"""How many tokens to draft: fixed, or what pays by acceptance and cost."""
