"""Launches of a beam search on a GPU, over the steps of a head that leaves logits.

    offer(logits, beams, rows)        what each row of a step has to offer, unless ranks with a GPU
                                      each list it together (plugins/ops/rank_offers)
    select(beams, requests, ...)      the best continuations: the next step's tokens and rows
    merge(beams, trees, requests, n)  when n tokens of each beam are known, their tree

`reference.py` has the first of these; beams.py and packing.py of runtime/drafting/redrafter/ are
what the others do, on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmctl.plugins.backends.cuda.kernel_spec import KernelSpec, Launch
from llmctl.plugins.ops.quantize.kernel import power_of_two
from llmctl.plugins.ops.sampling.arrays import CHUNK

if TYPE_CHECKING:
    import torch

_SOURCE = "llmctl.plugins.ops.beam_search.triton_kernel"


@dataclass(frozen=True, slots=True)
class BeamArrays:
    """What a search of B requests with W beams of up to L tokens keeps on the device."""

    keys: torch.Tensor  # [B * W, chunks, W] int64: the likeliest of each chunk of each row
    sums: torch.Tensor  # [B * W, chunks, 2] float32: largest logit, sum of exponentials
    scores: tuple[torch.Tensor, torch.Tensor]  # [B, W] float32 each, of steps by turns
    history: tuple[torch.Tensor, torch.Tensor]  # [B, W, L] int32 each, too
    places: torch.Tensor  # [B, W, L] int32: scratch of `merge`
    vocab_size: int

    @classmethod
    def allocate(
        cls,
        max_batch_size: int,
        num_beams: int,
        length: int,
        vocab_size: int,
        device: str | torch.device,
        chunks: int | None = None,
    ) -> BeamArrays:
        """Arrays of zeros. chunks: of a row, where not `offer` lists them."""
        import torch

        rows = max_batch_size * num_beams
        chunks = chunks or num_chunks(vocab_size)
        shape = (max_batch_size, num_beams)
        floats, ints = torch.float32, torch.int32
        return cls(
            torch.zeros((rows, chunks, num_beams), dtype=torch.int64, device=device),
            torch.zeros((rows, chunks, 2), dtype=floats, device=device),
            _both(lambda: torch.zeros(shape, dtype=floats, device=device)),
            _both(lambda: torch.zeros((*shape, length), dtype=ints, device=device)),
            torch.zeros((*shape, length), dtype=ints, device=device),
            vocab_size,
        )

    @property
    def chunks(self) -> int:
        """Of a row of logits."""
        return self.keys.shape[1]

    @property
    def num_beams(self) -> int:
        """W."""
        return self.keys.shape[2]

    @property
    def length(self) -> int:
        """L."""
        return self.places.shape[2]


def _both(make: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return make(), make()


def num_chunks(vocab_size: int) -> int:
    """Of a row of logits, by `offer`."""
    return -(-vocab_size // CHUNK)


def kernels(
    num_beams: int, length: int, vocab_size: int, max_draft_len: int, listed: int | None = None
) -> list[KernelSpec]:
    """Every binary of searches with so many beams of up to so many tokens. listed: chunks of a row
    that ranks list together, besides those of `offer`."""
    shape, chunks = (num_beams, length, vocab_size), num_chunks(vocab_size)
    selects = {
        spec.name: spec
        for before in (1, num_beams)
        for spec in (_select_spec(*shape, before, each) for each in (chunks, listed or chunks))
    }
    merging = _merge_spec(num_beams, length, max_draft_len)
    return [_offer_spec(vocab_size), *selects.values(), merging]


def offer(logits: torch.Tensor, beams: BeamArrays, rows: int) -> Launch:
    """The likeliest tokens of the first rows of logits [rows or more, vocab_size] float32."""
    grid = (beams.chunks, rows, 1)
    return Launch(
        _offer_spec(beams.vocab_size), grid, (logits, beams.keys, beams.sums, beams.num_beams)
    )


def select(
    beams: BeamArrays, requests: int, step: int, tokens: torch.Tensor, rows: torch.Tensor
) -> Launch:
    """The beams with one token more than the `step` that are known: int32 `tokens` and `rows`
    [requests * W] of the head's next step. At step 0 each request has one row."""
    shape = (beams.num_beams, beams.length, beams.vocab_size)
    spec = _select_spec(*shape, beams.num_beams if step else 1, beams.chunks)
    turn = step % 2
    arguments = (
        beams.keys,
        beams.sums,
        beams.scores[1 - turn],
        beams.history[1 - turn],
        beams.scores[turn],
        beams.history[turn],
        tokens,
        rows,
        step,
    )
    return Launch(spec, (requests, 1, 1), arguments)


def merge(
    beams: BeamArrays,
    requests: int,
    length: int,
    drafts: torch.Tensor,
    parents: torch.Tensor,
    counts: torch.Tensor,
) -> Launch:
    """The trees of beams of which `length` tokens were selected: int32 drafts and parents
    [requests, max_draft_len] and counts [requests], as DraftTrees has them."""
    spec = _merge_spec(beams.num_beams, beams.length, drafts.shape[1])
    arguments = (
        beams.history[(length - 1) % 2],
        beams.places,
        drafts,
        parents,
        counts,
        length,
    )
    return Launch(spec, (requests, 1, 1), arguments)


def _offer_spec(vocab_size: int) -> KernelSpec:
    return KernelSpec(
        name=f"beams.offer.v{vocab_size}",
        source=f"{_SOURCE}:offer",
        arguments=("*fp32", "*i64", "*fp32", "i32"),
        constants={"VOCAB": vocab_size, "CHUNK": CHUNK, "PDL": True},
    )


def _select_spec(
    num_beams: int, length: int, vocab_size: int, before: int, chunks: int
) -> KernelSpec:
    words = [f"w{num_beams}", f"l{length}", f"v{vocab_size}"]
    words += [f"c{chunks}"] * (chunks != num_chunks(vocab_size))
    return KernelSpec(
        name=".".join(["beams", "select", *words, f"from{before}"]),
        source=f"{_SOURCE}:select",
        arguments=("*i64", "*fp32", "*fp32", "*i32", "*fp32", "*i32", "*i32", "*i32", "i32"),
        constants={
            "NUM_BEAMS": num_beams,
            "BEFORE": before,
            "LENGTH": length,
            "VOCAB": vocab_size,
            "NUM_CHUNKS": chunks,
            "BLOCK_CHUNKS": power_of_two(chunks),
            "BLOCK_KEYS": power_of_two(chunks * num_beams),
            "BLOCK_BEAMS": power_of_two(num_beams),
            "BLOCK_LENGTH": power_of_two(length),
            "PDL": True,
        },
        num_warps=min(16, max(4, power_of_two(num_beams) ** 2 // 256)),
    )


def _merge_spec(num_beams: int, length: int, max_draft_len: int) -> KernelSpec:
    return KernelSpec(
        name=f"beams.merge.w{num_beams}.l{length}.k{max_draft_len}",
        source=f"{_SOURCE}:merge",
        arguments=("*i32",) * 5 + ("i32",),
        constants={
            "NUM_BEAMS": num_beams,
            "LENGTH": length,
            "MAX_DRAFT_LEN": max_draft_len,
            "BLOCK_BEAMS": power_of_two(num_beams),
            "BLOCK_LENGTH": power_of_two(length),
            "PDL": True,
        },
    )
