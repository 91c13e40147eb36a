"""Launches of device sampling: argmax of rows of logits, and draws as spec.py describes them.

    argmax(logits, out, scratch, rows)
    sample(logits, out, scratch, rows, arrays, positions)

Row r of `logits` [rows, vocab] float32 belongs to request r // per_request and draws the token at
position positions[request] + first + r % per_request; it is stored in out[r * stride + offset].
Rows with penalties or banned ids are not for these kernels. A row with NaN gives -1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmctl.plugins.cuda.kernel import KernelSpec, Launch
from llmctl.plugins.sampling.arrays import CHUNK, GROUP, SamplingArrays, SamplingScratch

if TYPE_CHECKING:
    import torch

_SOURCE = "llmctl.plugins.sampling.triton_kernel"
_TILE = 1024  # ids that a thread block works on at a time, in float64
_REQUEST = ("*fp64", "*i32", "*fp64", "*fp64", *("*i32",) * 5)
_SCANNED = ("*i64", "*fp64", "*i32", "*fp32")


def kernels(vocab: int) -> list[KernelSpec]:
    """The binaries for rows of `vocab` logits."""
    return [_argmax_spec(vocab), _scan_spec(vocab), _finish_spec(vocab)]


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
    arguments = (logits, out, scratch.keys, scratch.arrivals, stride, offset)
    return Launch(_argmax_spec(vocab), (-(-vocab // CHUNK), rows, 1), arguments)


def sample(
    logits: torch.Tensor,
    out: torch.Tensor,
    scratch: SamplingScratch,
    rows: int,
    arrays: SamplingArrays,
    positions: torch.Tensor,
    *,
    per_request: int = 1,
    first: int = 0,
    stride: int = 1,
    offset: int = 0,
) -> list[Launch]:
    """Draw a token from each row: requests and positions as above; `positions` [requests] int32."""
    vocab = logits.shape[1]
    request = (
        arrays.temperature,
        arrays.top_k,
        arrays.top_p,
        arrays.min_p,
        arrays.seed_low,
        arrays.seed_high,
        arrays.stream,
        arrays.greedy,
        positions,
    )
    scanned = (scratch.chunk_keys, scratch.chunk_values, scratch.chunk_ids, scratch.group_tops)
    candidates = (scratch.groups, scratch.ids, scratch.values, scratch.masses)
    scan = Launch(
        _scan_spec(vocab),
        (-(-vocab // CHUNK), rows, 1),
        (logits, *request, *scanned, per_request, first),
    )
    finish = Launch(
        _finish_spec(vocab),
        (min(rows, len(scratch.ids)), 1, 1),
        (
            *(logits, out, *request, *scanned, *candidates),
            *(per_request, first, stride, offset, rows),
        ),
    )
    return [scan, finish]


def _argmax_spec(vocab: int) -> KernelSpec:
    return KernelSpec(
        name=f"sampling.argmax.v{vocab}",
        source=f"{_SOURCE}:argmax",
        arguments=("*fp32", "*i32", "*i64", "*i32", "i32", "i32"),
        constants={"VOCAB": vocab, "CHUNK": CHUNK, "PDL": True},
    )


def _scan_spec(vocab: int) -> KernelSpec:
    return KernelSpec(
        name=f"sampling.scan.v{vocab}",
        source=f"{_SOURCE}:scan",
        arguments=("*fp32", *_REQUEST, *_SCANNED, "i32", "i32"),
        constants={"VOCAB": vocab, "CHUNK": CHUNK, "GROUP": GROUP, "TILE": _TILE, "PDL": True},
        num_warps=8,
    )


def _finish_spec(vocab: int) -> KernelSpec:
    def power_of_two(count: int) -> int:
        return 1 << max(0, count - 1).bit_length()

    return KernelSpec(
        name=f"sampling.finish.v{vocab}",
        source=f"{_SOURCE}:finish",
        arguments=(
            *("*fp32", "*i32", *_REQUEST, *_SCANNED, "*i32", "*i32", "*fp32", "*i64"),
            *("i32",) * 5,
        ),
        constants={
            "VOCAB": vocab,
            "CHUNK": CHUNK,
            "GROUP": GROUP,
            "BLOCK_CHUNKS": power_of_two(-(-vocab // CHUNK)),
            "BLOCK_GROUPS": power_of_two(-(-vocab // GROUP)),
            "TILE": _TILE,
            # exp(score) <= 1 as an integer: the sum over a vocabulary stays below 2 ** 62
            "MASS_UNIT": 2.0 ** (62 - vocab.bit_length()),
            "PDL": True,
        },
        num_warps=16,
    )
