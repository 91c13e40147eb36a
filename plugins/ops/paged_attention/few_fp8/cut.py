"""How many of a request's tokens a thread block of `few_fp8.cu` has.

A thread block reads a context once for all of its rows, so as many as possible are best for long
contexts and many requests. With few and short ones there are more multiprocessors than work items:
then fewer rows in more thread blocks take less time.
"""

from __future__ import annotations

from dataclasses import dataclass

from llmctl.plugins.core.calls import OpCall
from llmctl.plugins.ops.paged_attention.chunk_fp8.reference import KEYS, UNIT
from llmctl.plugins.ops.paged_attention.shared.source_specs import group_size

# Query tokens times query heads of a KV head, in a thread block, and microseconds: for a tile, for
# one where every multiprocessor reads other keys, and besides tiles. Measured on one H200, one and
# two requests of 4 and 11 tokens with 400 to 8,192 tokens of context
# (docs/performance/log/fp8_attention.md).
_US = {8: (0.5, 0.75, 3.6), 32: (0.62, 1.0, 4.1), 48: (0.78, 0.95, 5.1), 88: (1.0, 1.0, 7.5)}
_ITEM_US = 1.0  # more for each work item but the first
_SHARED_US = 3.0  # more where thread blocks share a context: they wait for each other, and merge
ROWS = tuple(_US)


@dataclass(frozen=True, slots=True)
class Cut:
    """rows: of a thread block. tokens: of a request, in a thread block. blocks: of a request's
    tokens."""

    rows: int
    tokens: int
    blocks: int


def cuts(call: OpCall, tokens: int) -> list[Cut]:
    """For requests of so many tokens, the one with the fewest rows first."""
    group = group_size(call)
    found = {}
    for most in ROWS:
        if most < group:
            continue
        blocks = -(-tokens // (most // group))
        each = -(-tokens // blocks)
        rows = next(rows for rows in ROWS if rows >= each * group)
        found[rows] = Cut(rows, each, -(-tokens // each))
    return [found[rows] for rows in sorted(found)]


def choose_cut(call: OpCall, tokens: int, requests: int, max_kv_len: int, num_sms: int) -> Cut:
    """The fastest one, for requests of so many tokens, if all have the longest context."""
    contexts = requests * int(call.attributes["num_kv_heads"])
    tiles = max(-(-max_kv_len // KEYS), 1)
    items = -(-tiles // UNIT)

    def us(cut: Cut) -> float:
        tile, with_all, fixed = _US[cut.rows]
        blocks = contexts * cut.blocks
        sharing = max(min(num_sms // blocks, items), 1)
        own = max(-(-items // sharing), -(-blocks * items // num_sms))
        tile = max(tile, with_all * min(blocks * sharing / num_sms, 1.0))
        shared = _SHARED_US if sharing > 1 else 0.0
        return fixed + own * min(UNIT, tiles) * tile + (own - 1) * _ITEM_US + shared

    return min(cuts(call, tokens), key=us)
