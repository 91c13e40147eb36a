"""Query/key normalization, rotary embedding and the write into the paged KV cache."""
