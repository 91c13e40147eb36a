"""Small engines with a ReDrafter head, for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llmctl.builder.build import plan_build, run_build
from llmctl.builder.config import BuildRequest
from support.redrafter import Tensors, make_head

HIDDEN, VOCAB = 64, 131  # of tiny targets
BEAMS = {"redrafter_num_beams": 3, "redrafter_draft_len_per_beam": 2}
REDRAFTER: dict[str, Any] = {
    "speculative_decoding_mode": "redrafter",
    "max_batch_size": 4,
    **BEAMS,
}


def tensors_of(recurrence: str, **fields: Any) -> Tensors:
    """A random head of that recurrence for a tiny target."""
    return make_head(HIDDEN, VOCAB, is_rnn=recurrence != "sum", **fields)


def build(target: Path, folder: Path, head: Path, **fields: Any) -> Path:
    """The engine of a target with a head, on the cpu."""
    request = BuildRequest(**{**REDRAFTER, "draft_model_dir": str(head), **fields})
    run_build(plan_build(target, request, backend="cpu"), folder)
    return folder
