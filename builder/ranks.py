"""How a model is divided among the ranks of a tensor-parallel engine, in numbers.

A rank computes some of the heads, part of the MLP's intermediate dimension, part of the vocabulary
and part of the rows of draft heads. Embedding and norms are whole on every rank.
"""

from __future__ import annotations

from typing import Protocol

from llmctl.errors import Unsupported
from llmctl.plugins.backends.backend import Backend
from llmctl.plugins.core.op_rules import LEAF_MULTIPLE, RANK_COUNTS

SUM_LEAVES = RANK_COUNTS[-1]  # of K in a rank-invariant engine: whole subtrees for every tp_size
_TILE_ROWS = 64  # a rank's share of rows is a multiple: tiles of packed weights


def engine_file(rank: int) -> str:
    """The name of one rank's engine file."""
    return f"rank{rank}.engine"


class Widths(Protocol):
    """What is asked of a model."""

    @property
    def num_attention_heads(self) -> int: ...
    @property
    def num_key_value_heads(self) -> int: ...
    @property
    def head_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...


def local_kv_heads(num_kv_heads: int, num_ranks: int) -> int:
    """KV heads of one rank: its share, or one that several ranks repeat."""
    return max(1, num_kv_heads // num_ranks)


def row_share(rows: int, num_ranks: int) -> int:
    """Rows of an output projection on each rank; the last ranks' may be padding."""
    share = -(-rows // num_ranks)
    return -(-share // _TILE_ROWS) * _TILE_ROWS


def divides_rows(rows: int, num_ranks: int) -> bool:
    """Whether a product of a draft head gives each rank as many rows, whole tiles without padding:
    what reads them is then as wide as it was."""
    return num_ranks > 1 and rows % (num_ranks * _TILE_ROWS) == 0


def require_divisible(model: Widths, num_ranks: int) -> None:
    """Raise Unsupported where the model does not divide evenly over so many ranks."""
    for name in ("num_attention_heads", "intermediate_size"):
        if getattr(model, name) % num_ranks:
            raise Unsupported(
                f"--tp-size {num_ranks}: the model's {name} is {getattr(model, name)}, which does "
                "not divide evenly",
                fix="a tp_size that divides the heads and the intermediate size",
            )
    kv_heads = model.num_key_value_heads
    if kv_heads % num_ranks and num_ranks % kv_heads:
        raise Unsupported(
            f"--tp-size {num_ranks}: the model's num_key_value_heads is {kv_heads}; ranks have "
            "several of them each, or several ranks repeat one",
            fix="a tp_size that divides the KV heads or is a multiple of them",
        )


def require_ranks(tp_size: int, backend: Backend, *, is_invariant: bool) -> None:
    """Raise Unsupported for a number of ranks whose sums no kernel of the backend adds, and for
    sums over leaves where none has them."""
    counts = backend.rank_counts
    if counts is not None and tp_size not in counts:
        only = f"{', '.join(map(str, counts))} ranks" if len(counts) > 1 else "one rank"
        others = "" if len(counts) > 1 else ", or --backend cpu"
        raise Unsupported(
            f"--tp-size {tp_size} is refused: engines of the {backend.name} backend have {only}",
            fix=f"--tp-size {max(c for c in counts if c <= max(tp_size, 1))}{others}",
        )
    if is_invariant and not backend.has_leaves:
        raise Unsupported(
            f"--tp-invariant is refused: products of the {backend.name} backend add in one order, "
            "which ranks cannot share",
            fix="--backend cpu",
        )


def require_leaves(model: Widths, *, is_wanted: bool) -> None:
    """Raise Unsupported where sums of the model are to divide into leaves and do not."""
    if not is_wanted:
        return
    widths = {
        "the attention's output": model.num_attention_heads * model.head_size,
        "intermediate_size": model.intermediate_size,
    }
    for name, width in widths.items():
        if width % (SUM_LEAVES * LEAF_MULTIPLE):
            raise Unsupported(
                f"--tp-invariant: {name} of the model is {width} wide; a multiple of "
                f"{SUM_LEAVES * LEAF_MULTIPLE} is wanted, so that the {SUM_LEAVES} parts of a sum "
                f"are whole vectors of {LEAF_MULTIPLE}",
                fix="leave --tp-invariant out: text is then the same for one tp_size alone",
            )
