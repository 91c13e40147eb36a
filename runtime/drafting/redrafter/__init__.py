"""Drafts from a recurrent head in the target's engine: beams, with common beginnings merged."""
