"""Query, key and value projections with the rotary embedding and the KV write in the epilogue."""
