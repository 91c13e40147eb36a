"""llmctl beside other systems on the same load."""
