"""Drafts from a second, smaller engine."""
