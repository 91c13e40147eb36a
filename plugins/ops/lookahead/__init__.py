"""Windows and pools of lookahead decoding on a GPU; no operator, but what rounds draft with."""
