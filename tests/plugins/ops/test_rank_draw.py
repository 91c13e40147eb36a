"""Draws without filters from rows of which ranks have shares: the tokens of whole rows, bit for bit
however the vocabulary is divided; by the scan in the interpreter and the peers' own source on a
CPU, and compiled without spills."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from support.emulated_peers import DRAWS, compile_peers
from support.peer_buffers import Buffers, pointer, run_ranks
from support.sampling import Params, make_arrays, make_logits

from llmctl.plugins.backends.cuda.compiler import compile_kernel
from llmctl.plugins.backends.cuda.interpret import run_launches
from llmctl.plugins.core.calls import OpCall
from llmctl.plugins.ops.all_gather import kernel as all_gather
from llmctl.plugins.ops.rank_draw import kernel
from llmctl.plugins.ops.sampling import arrays as sampling_arrays
from llmctl.plugins.ops.sampling import kernel as sampling
from llmctl.plugins.ops.sampling.arrays import DrawnRows, SamplingScratch
from llmctl.plugins.ops.sampling.reference import sample_rows
from llmctl.plugins.ops.sampling.spec import SamplingRow

OWN, CHUNK, MOST_ROWS = 96, 64, 6  # a share is one and a half chunks
STRIDE, OFFSET, FIRST = 3, 1, 2
PREFERENCES = [
    Params(),
    Params(temperature=1.7),
    Params(temperature=1e-30),  # the best logit, or one that equals it
    Params(is_greedy=True),
    Params(temperature=1e30),
    Params(temperature=0.3),
]


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (sampling_arrays, sampling, kernel):
        monkeypatch.setattr(module, "CHUNK", CHUNK)


@dataclass
class Case:
    """Rows of as many requests, two of each; `found` are every rank's tokens."""

    shares: list[torch.Tensor]
    requests: list[SamplingRow]
    scanned: list[SamplingScratch]
    found: list[torch.Tensor]
    wanted: list[int]


def make_case(ranks: int, vocab: int, requests: int, seed: int) -> Case:
    logits = np.concatenate([make_logits(vocab, seed + i) for i in range(2)])[: 2 * requests]
    generator = np.random.default_rng(seed)
    logits[generator.integers(len(logits))] = generator.standard_normal(vocab) - 100
    alike = generator.integers(len(logits))
    logits[alike] = -3.0
    logits[alike, generator.integers(vocab, size=5)] = 4.0  # five alike, of several ranks
    if seed % 3 == 0:
        logits[generator.integers(len(logits)), generator.integers(vocab)] = np.nan
    if seed % 3 == 1:
        logits[generator.integers(len(logits))] = -np.inf
    rows = [
        SamplingRow(PREFERENCES[(seed + i) % len(PREFERENCES)], 7 * seed + i, 5 * i)
        for i in range(requests)
    ]
    drawn = [replace(row, position=row.position + FIRST + i) for row in rows for i in range(2)]
    padding = np.zeros((len(logits), ranks * OWN - vocab), np.float32)
    whole = torch.from_numpy(np.concatenate([logits, padding], axis=1))
    shares = [part.contiguous() for part in whole.split(OWN, dim=1)]
    outs = [torch.full((len(logits) * STRIDE,), -7, dtype=torch.int32) for _ in range(ranks)]
    wanted = sample_rows(logits, drawn).tolist()
    return Case(shares, rows, [scan(rank, vocab, shares, rows) for rank in range(ranks)], outs,
                wanted)  # fmt: skip


def scan(
    rank: int, vocab: int, shares: list[torch.Tensor], requests: list[SamplingRow]
) -> SamplingScratch:
    """What a rank finds in its share."""
    x, scratch = shares[rank], SamplingScratch.allocate(len(shares[0]), vocab, "cpu")
    rows = DrawnRows(len(x), *make_arrays(requests), per_request=2, first=FIRST)
    with np.errstate(all="ignore"):
        run_launches([sampling.scan_share(x, vocab, rank * x.shape[1], scratch, rows)])
    return scratch


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_peers_draw_what_one_rank_draws(ranks: int, small_chunks: None) -> None:
    """Launch after launch, whoever is late; what was given is cleared. The last rank has padding:
    of eight, nothing else."""
    vocab = ranks * OWN - (OWN + 3 if ranks == 8 else 59)
    library = compile_peers(DRAWS, RANKS=ranks, LEAVES=1, CHUNKS=-(-OWN // CHUNK))
    buffers, draw = Buffers(ranks, MOST_ROWS * OWN * 4), random.Random(ranks)
    cases = [make_case(ranks, vocab, draw.choice((1, 2, 3)), seed) for seed in range(6)]

    def body(rank: int) -> None:
        own = random.Random(rank)
        for case in cases:
            time.sleep(own.choice((0, 0, 0.002)))
            launch(buffers, library, rank, case, 30 * 10**9)

    run_ranks([lambda rank=rank: body(rank) for rank in range(ranks)])
    for number, case in enumerate(cases):
        for found in case.found:
            assert found[OFFSET::STRIDE].tolist() == case.wanted, number
            assert (found.view(-1, STRIDE)[:, [0, 2]] == -7).all()
    buffers.require_left_empty(len(cases))
    assert len({token for case in cases for token in case.wanted}) > 8


def launch(buffers: Buffers, library: object, rank: int, case: Case, limit_ns: int) -> None:
    scratch, (arrays, _) = case.scanned[rank], make_arrays(case.requests)
    rows, greedy = len(case.shares[rank]), arrays.greedy
    keys = scratch.chunk_keys.view(-1)[: rows * -(-OWN // CHUNK)].view(rows, -1)
    given = [scratch.chunk_values, scratch.chunk_rests, scratch.chunk_ids, greedy, case.found[rank]]
    places = [*map(pointer, given), 2, STRIDE, OFFSET]
    buffers.call(library, rank, keys, (min(rows, 2), 1), places, limit_ns)


def test_rows_of_a_rank_that_does_not_come_are_nobodys(small_chunks: None) -> None:
    library = compile_peers(DRAWS, RANKS=2, LEAVES=1, CHUNKS=-(-OWN // CHUNK))
    buffers, case = Buffers(2, MOST_ROWS * OWN * 4), make_case(2, 2 * OWN, 2, 2)
    for limit_ns in (10**8, 60 * 10**9):  # the second launch sees that rank 1 is lost
        launch(buffers, library, 0, case, limit_ns)
    assert case.found[0][OFFSET::STRIDE].tolist() == [-1] * 4 and int(buffers.lost[0]) == 2


def best_of(scratches: list[SamplingScratch], chunks: int) -> list[tuple[float, float, int]]:
    """(total, rest, id) of the best draw of each row, in every bit."""
    found = [
        list(
            zip(
                *(getattr(s, name).view(-1).tolist() for name in ("chunk_values", "chunk_rests")),
                (-s.chunk_ids.view(-1)).tolist(),
                strict=True,
            )
        )
        for s in scratches
    ]
    rows = len(scratches[0].chunk_ids)
    return [max(e for each in found for e in each[r * chunks :][:chunks]) for r in range(rows)]


@pytest.mark.parametrize("temperature", [0.7, 1e-30, 1e-4, 1e30])
def test_draws_are_the_same_numbers_however_the_vocabulary_is_divided(
    temperature: float, small_chunks: None
) -> None:
    """Ties are decided by what a float64 does not hold."""
    vocab = 4 * OWN
    logits = torch.randn((4, vocab), generator=torch.Generator().manual_seed(3)).round()
    requests = [SamplingRow(Params(temperature=temperature), seed, 9) for seed in range(2)]
    whole = scan(0, vocab, [logits], requests)
    wanted = best_of([whole], vocab // CHUNK)
    for ranks in (2, 4):
        shares = [part.contiguous() for part in logits.split(vocab // ranks, dim=1)]
        found = [scan(rank, vocab, shares, requests) for rank in range(ranks)]
        assert best_of(found, -(-vocab // ranks // CHUNK)) == wanted
    assert len({found[2] for found in wanted}) > 1


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("vocab", [32000, 128256])
def test_the_kernels_compile_without_spills(ranks: int, vocab: int) -> None:
    share = torch.empty((1, -(-vocab // (64 * ranks)) * 64), device="meta")
    out = torch.empty((1, vocab), device="meta")
    call = OpCall("all_gather", "g", {"x": share}, {"out": out}, {"ranks": ranks})
    specs = kernel.kernels(call)
    assert [spec.is_triton for spec in specs] == [True, False]
    assert {spec.name for spec in specs} <= {s.name for s in all_gather.kernels(call, None)}
    assert all(compile_kernel(spec).local_bytes == 0 for spec in specs)
