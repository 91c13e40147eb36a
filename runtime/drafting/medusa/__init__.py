"""Drafts from heads in the target's engine: a static tree of each head's likeliest tokens."""
