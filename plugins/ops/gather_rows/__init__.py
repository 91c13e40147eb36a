"""The rows of an activation that get logits."""
