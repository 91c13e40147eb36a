"""The backends that execute a plan: one folder each."""
