"""No drafts: one token per step."""
