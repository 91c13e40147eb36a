"""Launches of device sampling: argmax of rows of logits, and draws as spec.py describes them.

    argmax(logits, out, scratch, count)
    sample(logits, out, scratch, DrawnRows(count, arrays, positions))

`logits` are [rows, vocab] float32; `DrawnRows` says whose rows they are. Rows with penalties or
banned ids are not for these kernels. A row with NaN gives -1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmctl.plugins.backends.cuda.kernel_spec import Constant, KernelSpec, Launch
from llmctl.plugins.ops.sampling.arrays import (
    BUCKETS,
    CHUNK,
    GROUP,
    LISTED,
    DrawnRows,
    SamplingScratch,
)
from llmctl.plugins.ops.sampling.spec import SamplingParams

if TYPE_CHECKING:
    import torch

_SOURCE = "llmctl.plugins.ops.sampling.triton_kernel"
_WIDE = "llmctl.plugins.ops.sampling.triton_wide"
assert BUCKETS == 4096, "the kernels have 64 lines of 64 buckets"
AWAITED_WARPS = 4  # of a thread block of the kernels that `awaited` is for
_TILE = 1024  # ids that a thread block of `finish` works on at a time, in float64
_REQUEST = ("*fp64", "*i32", "*fp64", "*fp64", *("*i32",) * 5)
_SCANNED = ("*i64", "*fp64", "*fp64", "*i32", "*fp32")


def kernels(vocab: int) -> list[KernelSpec]:
    """The binaries for rows of `vocab` logits."""
    specs = _argmax_spec, _weigh_spec, _sift_spec, _finish_spec
    return [scan_spec(vocab, vocab), *(spec(vocab) for spec in specs)]


def has_filter(params: SamplingParams, vocab: int) -> bool:
    """True for a request whose draws are not from all ids."""
    if params.is_greedy:
        return False
    has_top_k = bool(params.top_k and params.top_k < vocab)
    return has_top_k or (params.top_p is not None and params.top_p < 1) or params.min_p > 0


def is_wide(params: SamplingParams, vocab: int) -> bool:
    """True for a request whose filters may keep much of the vocabulary."""
    has_top_k = bool(params.top_k and params.top_k < vocab)
    return has_filter(params, vocab) and not has_top_k


def argmax(
    logits: torch.Tensor,
    out: torch.Tensor,
    scratch: SamplingScratch,
    rows: int,
    *,
    stride: int = 1,
    offset: int = 0,
) -> Launch:
    """out[r * stride + offset] = the best id of row r; the lowest on ties, -1 if it has NaN."""
    vocab = logits.shape[1]
    arguments = (logits, out, scratch.keys, stride, offset)
    return Launch(_argmax_spec(vocab), (-(-vocab // CHUNK), rows, 1), arguments)


def sample(
    logits: torch.Tensor,
    out: torch.Tensor,
    scratch: SamplingScratch,
    rows: DrawnRows,
    *,
    has_wide: bool,
) -> list[Launch]:
    """Draw a token from each row.

    Without `has_wide` there are two launches instead of four. Tokens are the same, but rows of
    requests that `is_wide` take up to a hundred times longer.
    """
    vocab = logits.shape[1]
    arrays, per_request = rows.arrays, rows.per_request
    places = (per_request, rows.first, rows.stride, rows.offset)
    request, scanned = _request_values(rows), _scanned_values(scratch)
    candidates = (scratch.groups, scratch.ids, scratch.values, scratch.masses)
    scan = scan_share(logits, vocab, 0, scratch, rows)
    wide: list[Launch] = []
    if has_wide:
        shared = (scratch.borders, scratch.marks)
        listed = (scratch.num_listed, scratch.listed_ids, scratch.listed_values)
        weighed = (arrays.temperature, arrays.top_k, arrays.top_p, arrays.min_p, arrays.greedy)
        sums = (scratch.arrivals, scratch.histogram, scratch.totals)
        weigh = Launch(
            _weigh_spec(vocab),
            scan.grid,
            (
                logits,
                *weighed,
                scratch.chunk_keys,
                scratch.chunk_values,
                *sums,
                *shared,
                per_request,
            ),
        )
        drawn = (scratch.chunk_values, scratch.chunk_ids, scratch.arrivals, scratch.settled)
        sift = Launch(
            _sift_spec(vocab),
            scan.grid,
            (logits, out, *request, *drawn, *shared, *listed, *places),
        )
        wide = [weigh, sift]
    finish = Launch(
        _finish_spec(vocab),
        (min(rows.count, len(scratch.ids)), 1, 1),
        (
            *(logits, out, *request, *scanned, *candidates, scratch.settled),
            *(*places, rows.count),
        ),
    )
    return [scan, *wide, finish]


def scan_share(
    logits: torch.Tensor,
    vocab: int,
    first_id: int,
    scratch: SamplingScratch,
    rows: DrawnRows,
) -> Launch:
    """The best of every CHUNK ids of each row, in the scratch's arrays of chunks. logits: of the
    ids from `first_id` on, some of `vocab`, with what is behind them for padding; a multiple of
    four."""
    own = logits.shape[1]
    arguments: tuple[torch.Tensor | int, ...] = (
        *(logits, *_request_values(rows), *_scanned_values(scratch)),
        *(rows.per_request, rows.first, first_id),
    )
    return Launch(scan_spec(own, vocab), (-(-own // CHUNK), rows.count, 1), arguments)


def _request_values(rows: DrawnRows) -> tuple[torch.Tensor, ...]:
    """`_REQUEST`."""
    return (*rows.arrays.tensors, rows.positions)


def _scanned_values(scratch: SamplingScratch) -> tuple[torch.Tensor, ...]:
    """`_SCANNED`."""
    drawn = (scratch.chunk_values, scratch.chunk_rests, scratch.chunk_ids)
    return (scratch.chunk_keys, *drawn, scratch.group_tops)


def _argmax_spec(vocab: int) -> KernelSpec:
    return KernelSpec(
        name=f"sampling.argmax.v{vocab}",
        source=f"{_SOURCE}:argmax",
        arguments=("*fp32", "*i32", "*i64", "i32", "i32"),
        constants={**awaited(vocab), "PDL": True},
        num_warps=AWAITED_WARPS,
    )


def scan_spec(own: int, vocab: int) -> KernelSpec:
    """Of `scan_share`."""
    return KernelSpec(
        name=f"sampling.scan.w{own}.v{vocab}",
        source=f"{_SOURCE}:scan",
        arguments=("*fp32", *_REQUEST, *_SCANNED, "i32", "i32", "i32"),
        constants={"OWN": own, "VOCAB": vocab, "CHUNK": CHUNK, "GROUP": GROUP, "PDL": True},
        num_warps=8,
    )


def _weigh_spec(vocab: int) -> KernelSpec:
    return KernelSpec(
        name=f"sampling.weigh.v{vocab}",
        source=f"{_WIDE}:weigh",
        arguments=(
            *("*fp32", "*fp64", "*i32", "*fp64", "*fp64", "*i32"),
            *("*i64", "*fp64", "*i32", "*i64", "*i64", "*fp32", "*i64", "i32"),
        ),
        constants=_shared_constants(vocab),
        num_warps=8,
    )


def _sift_spec(vocab: int) -> KernelSpec:
    return KernelSpec(
        name=f"sampling.sift.v{vocab}",
        source=f"{_WIDE}:sift",
        arguments=(
            *("*fp32", "*i32", *_REQUEST, "*fp64", "*i32", "*i32", "*i32", "*fp32", "*i64"),
            *("*i32", "*i32", "*fp32"),
            *("i32",) * 4,
        ),
        constants={
            **_shared_constants(vocab),
            # ptxas 13.0 spills one register where it is smaller
            "BLOCK_CHUNKS": max(64, _power_of_two(-(-vocab // CHUNK))),
            "LISTED": LISTED,
        },
        num_warps=8,
    )


def _shared_constants(vocab: int) -> dict[str, Constant]:
    return {
        **chunked(vocab),
        # exp(score) <= 1 as an integer: the sum over a vocabulary stays below 2 ** 62
        "MASS_UNIT": 2.0 ** (62 - vocab.bit_length()),
        "PDL": True,
    }


def _finish_spec(vocab: int) -> KernelSpec:
    return KernelSpec(
        name=f"sampling.finish.v{vocab}",
        source=f"{_SOURCE}:finish",
        arguments=(
            *("*fp32", "*i32", *_REQUEST, *_SCANNED, "*i32", "*i32", "*fp32", "*i64", "*i32"),
            *("i32",) * 5,
        ),
        constants={
            **_shared_constants(vocab),
            "GROUP": GROUP,
            "BLOCK_GROUPS": _power_of_two(-(-vocab // GROUP)),
            "TILE": _TILE,
        },
        num_warps=16,
    )


def awaited(vocab: int) -> dict[str, Constant]:
    """How kernels cut a row of which a thread block waits for the others' chunks. As many places as
    it has threads, for Triton lets several threads read the same where there are fewer: one that
    looks again after another has found all keys, and cleared their places, would wait for ever."""
    cut = chunked(vocab)
    return {**cut, "BLOCK_CHUNKS": max(32 * AWAITED_WARPS, int(cut["BLOCK_CHUNKS"]))}


def chunked(vocab: int) -> dict[str, Constant]:
    """How kernels cut a row."""
    blocks = _power_of_two(-(-vocab // CHUNK))
    return {"VOCAB": vocab, "CHUNK": CHUNK, "BLOCK_CHUNKS": blocks}


def _power_of_two(count: int) -> int:
    return 1 << max(0, count - 1).bit_length()
