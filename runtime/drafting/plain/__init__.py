"""No drafts: one token a step."""
