"""Tensors that device sampling reads and works in: the draws' parameters and its scratch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

GROUP = 32  # ids whose largest logit is kept by the scan, so that the filter reads few groups
CHUNK = 2048  # ids that one thread block of the scan reads
LISTED = 16  # ids of a chunk that may lie at the border of a filter, if chunks work together
BUCKETS = 4096  # of exp(score): two ids of one bucket differ by 2% or less (triton_wide.py)
MAX_SLOTS = 32  # rows whose filters are applied at a time: 66 MB for 128,256 ids


@dataclass(frozen=True, slots=True)
class SamplingArrays:
    """How each request draws, [B] each. `greedy` != 0 takes the best id and ignores the rest.

    Temperatures and probabilities are float64, as the reference's are: the same request then draws
    the same token here and there. (H100 and H200 compute float64 at half the rate of float32.)
    """

    temperature: torch.Tensor  # float64, > 0
    top_k: torch.Tensor  # int32; 0: all ids
    top_p: torch.Tensor  # float64; 1: off
    min_p: torch.Tensor  # float64; 0: off
    seed_low: torch.Tensor  # int32, the bits of the seed's low word
    seed_high: torch.Tensor  # int32
    stream: torch.Tensor  # int32, see spec.py
    greedy: torch.Tensor  # int32

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All, in this order, in which kernels take them."""
        return tuple(getattr(self, name) for name in self.__slots__)

    @classmethod
    def allocate(cls, count: int, device: str | torch.device) -> SamplingArrays:
        """Arrays for `count` requests that all start as greedy ones."""
        import torch

        def full(value: float, dtype: torch.dtype) -> torch.Tensor:
            return torch.full((count,), value, dtype=dtype, device=device)

        return cls(
            temperature=full(1.0, torch.float64),
            top_k=full(0, torch.int32),
            top_p=full(1.0, torch.float64),
            min_p=full(0.0, torch.float64),
            seed_low=full(0, torch.int32),
            seed_high=full(0, torch.int32),
            stream=full(0, torch.int32),
            greedy=full(1, torch.int32),
        )


@dataclass(frozen=True, slots=True)
class DrawnRows:
    """Whose tokens rows of logits draw, and where they go: row r is of request r // per_request,
    draws the token at position positions[request] + first + r % per_request, and stores it in
    out[r * stride + offset]."""

    count: int
    arrays: SamplingArrays
    positions: torch.Tensor  # [requests] int32
    per_request: int = 1
    first: int = 0
    stride: int = 1
    offset: int = 0


@dataclass(frozen=True, slots=True)
class SamplingScratch:
    """What sampling works in, for up to `rows` rows of one vocabulary. Launches that may run at the
    same time need their own; launches of one stream share one."""

    keys: torch.Tensor  # [rows, chunks] int64: best logit and id, of argmax; zero between launches
    arrivals: torch.Tensor  # [rows] int32: finished chunks of a row; zero between launches
    chunk_keys: torch.Tensor  # [rows, chunks] int64: best logit and id
    chunk_values: torch.Tensor  # [rows, chunks] float64: best draw, or about the sum of exp(score)
    chunk_rests: torch.Tensor  # [rows, chunks] float64: what the best draw leaves of an exact one
    chunk_ids: torch.Tensor  # [rows, chunks] int32: id of the best draw
    group_tops: torch.Tensor  # [rows, groups] float32
    settled: torch.Tensor  # [rows] int32: the token is stored already; zero between launches
    # Filters that all chunks of a row work on (triton_wide.py).
    histogram: torch.Tensor  # [rows, BUCKETS] int64: mass by exp(score); zero between launches
    totals: torch.Tensor  # [rows] int64: mass of a row; zero between launches
    borders: torch.Tensor  # [rows, 4] float32: scores around the border, the best logit
    marks: torch.Tensor  # [rows, 4] int64: mass wanted of the border's bucket, the bucket, a shift
    num_listed: torch.Tensor  # [rows, chunks] int32
    listed_ids: torch.Tensor  # [rows, chunks, LISTED] int32: ids near the border
    listed_values: torch.Tensor  # [rows, chunks, LISTED] float32: their logits
    # Candidates that filters choose from; `slots` rows are filtered at a time.
    groups: torch.Tensor  # [slots, groups] int32: groups that hold candidates
    ids: torch.Tensor  # [slots, vocab rounded up to groups] int32
    values: torch.Tensor  # [slots, the same] float32: their logits
    masses: torch.Tensor  # [slots, the same] int64: exp(score) in units of the kernel's

    @classmethod
    def allocate(
        cls, rows: int, vocab: int, device: str | torch.device, *, slots: int = MAX_SLOTS
    ) -> SamplingScratch:
        """Scratch for `rows` rows of `vocab` logits: 16 bytes a logit for each of up to `slots`
        rows, and half a byte for the others."""
        import torch

        num_chunks, num_groups = -(-vocab // CHUNK), -(-vocab // GROUP)
        slots = min(slots, rows)

        def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            keys=zeros((rows, num_chunks), torch.int64),
            arrivals=zeros((rows,), torch.int32),
            chunk_keys=zeros((rows, num_chunks), torch.int64),
            chunk_values=zeros((rows, num_chunks), torch.float64),
            chunk_rests=zeros((rows, num_chunks), torch.float64),
            chunk_ids=zeros((rows, num_chunks), torch.int32),
            group_tops=zeros((rows, num_groups), torch.float32),
            settled=zeros((rows,), torch.int32),
            histogram=zeros((rows, BUCKETS), torch.int64),
            totals=zeros((rows,), torch.int64),
            borders=zeros((rows, 4), torch.float32),
            marks=zeros((rows, 4), torch.int64),
            num_listed=zeros((rows, num_chunks), torch.int32),
            listed_ids=zeros((rows, num_chunks, LISTED), torch.int32),
            listed_values=zeros((rows, num_chunks, LISTED), torch.float32),
            groups=zeros((slots, num_groups), torch.int32),
            ids=zeros((slots, num_groups * GROUP), torch.int32),
            values=zeros((slots, num_groups * GROUP), torch.float32),
            masses=zeros((slots, num_groups * GROUP), torch.int64),
        )
