"""Drafts looked up in the sequence's own tokens."""
