"""What is asked of engines is refused where it is asked for, before any of them is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmctl.errors import BadConfig
from llmctl.runtime.engine_options import EngineOptions


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"scheduler_policy": "max_utilization"}, "a member of CapacitySchedulerPolicy is wanted"),
        ({"context_chunking_policy": "equal_progress"}, "a member of ContextChunkingPolicy"),
        ({"adaptive_draft_len": True}, "adaptive_draft_len is asked for without a draft"),
        ({"max_tokens": 0}, "max_tokens of the KV cache is 0"),
        ({"rank_timeout_s": float("nan")}, "--rank-timeout is nan"),
        ({"host_memory_bytes": 1 << 20, "enable_block_reuse": False}, "block reuse is off"),
    ],
)
def test_what_would_be_ignored_is_refused(given, said):
    with pytest.raises(BadConfig, match=said):
        EngineOptions(Path("engine"), **given)
