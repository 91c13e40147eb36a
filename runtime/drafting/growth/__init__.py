"""Chains and trees of drafts, grown level by level from the logits of a head or a draft engine."""
