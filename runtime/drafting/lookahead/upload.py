"""Windows and pools of the host, written to the slots that device rounds keep them in."""

from __future__ import annotations

from collections.abc import Sequence as Items

import numpy as np
import torch
from numpy.typing import NDArray

from llmctl.builder.engine_format import LookaheadDecodingConfig
from llmctl.plugins.backends.cuda.queue import DeviceQueue
from llmctl.plugins.ops.lookahead import arrays as layout
from llmctl.plugins.ops.lookahead.arrays import LookaheadArrays
from llmctl.runtime.drafting.lookahead.drafter import Lookahead
from llmctl.runtime.drafting.lookahead.pool import ROWS, NgramPool
from llmctl.runtime.drafting.lookahead.window import NUM_SEEDS
from llmctl.runtime.request import Sequence

assert ROWS == layout.ROWS and NUM_SEEDS == layout.NUM_SEEDS


def write_state(
    arrays: LookaheadArrays, slot: int, state: Lookahead, end_id: int | None, queue: DeviceQueue
) -> None:
    """Window and pool of a sequence, as the host has them. Enqueues on the current stream."""
    window, (width, ngram_size, guesses) = state.window, state.config.sizes
    head = np.zeros(layout.HEAD_WIDTH, np.int32)
    head[layout.WIDTH], head[layout.LAST], head[layout.GUESSES] = width, ngram_size - 1, guesses
    head[layout.END_ID] = -1 if end_id is None else end_id
    head[layout.FILLED], head[layout.POSITION] = len(window.levels), window.position
    head[layout.ROUND] = -1
    cells = np.zeros(arrays.windows.shape[1], np.int32)
    cells[: len(window.levels) * width] = np.concatenate(window.levels)
    seeds = np.zeros(1 + layout.NUM_SEEDS, np.int32)
    seeds[0], seeds[1 : 1 + len(window.seeds)] = len(window.seeds), window.seeds
    pool = pool_rows(state.pool, arrays.sizes.row_width)
    for array, values in (
        (arrays.heads, head),
        (arrays.windows, cells),
        (arrays.seeds, seeds),
        (arrays.pools, pool),
    ):
        array[slot].copy_(queue.to_device(torch.from_numpy(values)))


def pool_rows(pool: NgramPool, width: int) -> NDArray[np.int32]:
    """The table of a pool, [ROWS, width]."""
    rows = np.zeros((layout.ROWS, width), np.int32)
    for row, (token, ngrams) in pool.rows.items():
        flat = [number for ngram in ngrams for number in ngram]
        rows[row, layout.OWNER], rows[row, layout.COUNT] = token + 1, len(ngrams)
        rows[row, layout.NGRAMS : layout.NGRAMS + len(flat)] = flat
    return rows


def write_texts(
    arrays: LookaheadArrays,
    sequences: Items[Sequence],
    configs: Items[LookaheadDecodingConfig],
    slots: Items[int],
    queue: DeviceQueue,
) -> None:
    """The slots of the next rounds' requests and the ends of their texts, each as long as its own
    n-grams; what the device drew for other rows is void. Enqueues on the current stream."""
    last = arrays.sizes.last
    both = np.full((len(slots), last + 1), -1, np.int32)
    both[:, 0] = slots
    for row, sequence, config in zip(both, sequences, configs, strict=True):
        own = config.ngram_size - 1
        tail = sequence.tokens[-own:]
        row[1 + own - len(tail) : 1 + own] = tail
    moved = queue.to_device(torch.from_numpy(both))
    index = moved[:, 0].long()
    arrays.slots[: len(slots)].copy_(moved[:, 0])
    arrays.texts[index, :last] = moved[:, 1:]
    arrays.heads[index, layout.ROUND] = -1
