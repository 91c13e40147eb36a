"""Drafts that grow level by level from what a head or a draft engine offers."""
