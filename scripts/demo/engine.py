"""An engine as a function from ids to logits, for the same protocols as any other model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from llmctl.plugins.core.calls import StepInputs
from llmctl.runtime.engines.engine import Engine, open_cpu_engine
from scripts.demo.evaluation import Logits


def engine_logits(engine_dir: Path) -> Logits:
    """ids [batch, length] -> logits [batch, length, vocab], each row from an empty cache."""
    engine = open_cpu_engine(engine_dir)
    engine.allocate_kv_cache(-(-engine.max_seq_len // engine.tokens_per_block))

    def logits(ids: torch.Tensor) -> torch.Tensor:
        rows = [_row_logits(engine, row) for row in ids.to(torch.int32).numpy()]
        return torch.stack(rows)

    return logits


def _row_logits(engine: Engine, ids: np.ndarray) -> torch.Tensor:
    """Logits of every position of one row, as many at a time as the engine has rows for."""
    num_blocks = -(-len(ids) // engine.tokens_per_block)
    table = np.arange(num_blocks, dtype=np.int32)[None]
    size = min(engine.max_num_rows, engine.max_num_tokens)
    chunks = []
    for start in range(0, len(ids), size):
        chunk = np.ascontiguousarray(ids[start : start + size])
        positions = np.arange(start, start + len(chunk), dtype=np.int32)
        step = StepInputs(
            token_ids=chunk,
            position_ids=positions,
            cu_q=np.array([0, len(chunk)], np.int32),
            kv_len=np.array([start + len(chunk)], np.int32),
            block_tables=table,
            slot_mapping=positions,  # block i of the table is block i of the cache
            logit_rows=np.arange(len(chunk), dtype=np.int32),
        )
        chunks.append(torch.from_numpy(engine.run(step).copy()))
    return torch.cat(chunks)
