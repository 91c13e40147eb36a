"""How an engine takes part in speculative decoding: the values of --speculative_decoding_mode."""

from __future__ import annotations

SPECULATIVE_MODES = {  # the number stored in config.json; TensorRT-LLM's
    "none": 1,
    "draft_tokens_external": 2,
    "medusa": 4,
    "lookahead_decoding": 8,
    "explicit_draft_tokens": 16,
    "eagle": 32,
}
