"""Drafts from an EAGLE head: one or several decoder layers that read the target's features."""
