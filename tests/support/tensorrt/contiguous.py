"""A monolithic plan evaluated as a runtime with slots would run it."""

from __future__ import annotations

from typing import Any

import numpy as np

from llmctl.builder.tensorrt.networks import PieceNetwork
from support.tensorrt.evaluated import (
    EvaluatedPiece,
    networks_of,
    plan_engine,
    to_numpy,
    weights_of,
)

SLOTS = 3
STALE = 7.0  # what a slot holds before it is written; it must not matter


class LinearCache:
    """The plans "whole" and "tree" of one engine, and slots that steps read and write."""

    def __init__(self, checkpoint: Any, **options: Any) -> None:
        engine = plan_engine(checkpoint, "tensorrt-rtx", kv_cache_type="continuous", **options)
        self.max_draft_len = engine.limits.max_draft_len
        self.networks: dict[str, PieceNetwork] = networks_of(engine)
        weights = {name: to_numpy(w) for name, w in weights_of(engine).items()}
        self.pieces = {n: EvaluatedPiece(piece, weights) for n, piece in self.networks.items()}
        self.capacity = engine.limits.max_seq_len
        self.caches: dict[str, np.ndarray] = {}
        for name, tensor in self.pieces["whole"].evaluator.inputs.items():
            if name.startswith("cache_"):
                from support.tensorrt.evaluator import dtype_of

                shape = (SLOTS, *tuple(tensor.shape)[1:])
                self.caches[name] = np.full(shape, STALE).astype(dtype_of(tensor.dtype))

    def run(
        self,
        ids: np.ndarray,
        first: np.ndarray,
        rows: np.ndarray,
        slots: slice = slice(0, SLOTS),
        piece: str = "whole",
        positions: np.ndarray | None = None,
        **more: np.ndarray,
    ) -> dict[str, np.ndarray]:
        """One step: ids [B, S] behind `first` [B] tokens of neighbouring slots, logits of `rows`
        [B, R] of each; outputs by name, logits as [B, R, vocab]."""
        batch, length = ids.shape
        if positions is None:
            positions = first[:, None] + np.arange(length)
        arrays = {
            "token_ids": ids,
            "position_ids": positions,
            "write_index": first,
            "logit_rows": rows + length * np.arange(batch)[:, None],
        }
        if piece == "whole":
            arrays["kv_length"] = first + length
            if self.max_draft_len:
                drafts = np.full((batch, rows.shape[1] - 1), -1)
                drafts[:, : length - 1] = ids[:, 1 : rows.shape[1]]
                arrays["drafts"] = drafts
        feeds = {name: np.ascontiguousarray(a, np.int32) for name, a in arrays.items()} | more
        feeds |= {name: cache[slots] for name, cache in self.caches.items()}
        found = self.pieces[piece].evaluator.run(feeds)
        for name, cache in self.caches.items():
            cache[slots] = found.pop(f"{name}_out")
        found["logits"] = found["logits"].reshape(*rows.shape, -1)
        return found
