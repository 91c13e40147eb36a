"""Many requests of one or two tokens, or few tokens in long contexts."""
