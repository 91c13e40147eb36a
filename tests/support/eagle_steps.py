"""Steps of an engine and of its EAGLE head, one after another, and what the head computed."""

from __future__ import annotations

import numpy as np
import torch

from llmctl.builder.engine_format import (
    EAGLE_EXTEND,
    EAGLE_FEATURES,
    EAGLE_NEXT,
    EAGLE_STATE,
    eagle_tap,
)
from llmctl.plugins.core.calls import StepInputs
from llmctl.runtime.engines.cuda_engine import CudaEngine
from llmctl.runtime.engines.engine import Engine
from llmctl.runtime.step import pack_next

CHUNKS = (200, 1, 6, 3, 64)


def steps(ids: list[int], size: int) -> list[StepInputs]:
    """Chunks of a text, the logits of the last token of each."""
    table = np.arange(-(-sum(CHUNKS) // size) + 1, dtype=np.int32)[::-1].copy()
    found, start = [], 0
    for count in CHUNKS:
        positions = np.arange(start, start + count, dtype=np.int32)
        found.append(
            StepInputs(
                token_ids=np.array(ids[start : start + count], np.int32),
                position_ids=positions,
                cu_q=np.array([0, count], np.int32),
                kv_len=np.array([start + count], np.int32),
                block_tables=table[None],
                slot_mapping=table[positions // size] * np.int32(size) + positions % np.int32(size),
                logit_rows=np.array([count - 1], np.int32),
            )
        )
        start += count
    return found


def computed(engine: Engine, ids: list[int]) -> list[np.ndarray]:
    """o and logits of the head behind each chunk and behind the next three tokens after it."""

    def host(found: dict[str, torch.Tensor]) -> None:
        for name in (EAGLE_STATE, "logits"):
            one = found[name]
            one = engine.queue.to_host(one) if isinstance(engine, CudaEngine) else one.clone()
            values.append(one.float().numpy())

    taps = [eagle_tap(layer) for layer in engine.config.build_config["draft_heads"]["taps"]]
    size, values, end = engine.tokens_per_block, list[np.ndarray](), 0
    own = steps(ids, size)
    for step, shifted in zip(own, steps(ids[1:], size), strict=True):
        end += step.num_tokens
        engine.run(step)
        features = [engine.output(tap) for tap in taps]
        engine.give_rows(EAGLE_EXTEND, EAGLE_FEATURES, features, np.arange(step.num_tokens))
        found = engine.run_head(EAGLE_EXTEND, shifted)
        host(found)
        for place in range(end, end + 3):
            token, at = np.array([ids[place + 1]], np.int32), np.array([place], np.int32)
            engine.give_rows(EAGLE_NEXT, EAGLE_STATE, [found[EAGLE_STATE]], np.array([0]))
            found = engine.run_head(EAGLE_NEXT, pack_next(token, at, own[0].block_tables, size))
            host(found)
    return values
