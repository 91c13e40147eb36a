"""Comparisons of llmctl with other systems under the same load."""
