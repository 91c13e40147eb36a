"""Drafts from an EAGLE head: one layer over the target's features."""
