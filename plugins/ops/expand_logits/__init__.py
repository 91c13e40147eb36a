"""Logits over a reduced vocabulary, as logits over the whole one."""
