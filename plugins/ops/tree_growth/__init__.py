"""Trees of drafts that grow on a GPU, level by level; no operator, but what rounds draft with."""
