"""Chains of several requests in long contexts."""
