"""The sampling kernels: interpreted, against the numpy reference, and as compiled code."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from llmctl.plugins.cuda.compiler import compile_kernel
from llmctl.plugins.cuda.interpret import run_launches
from llmctl.plugins.sampling import arrays as sampling_arrays
from llmctl.plugins.sampling import kernel
from llmctl.plugins.sampling.arrays import SamplingArrays, SamplingScratch
from llmctl.plugins.sampling.reference import (
    argmax_rows,
    processed_probs,
    sample_rows,
    survivors,
)
from llmctl.plugins.sampling.spec import SamplingRow

MASS_TOLERANCE = 1e-11  # a mass this close to the top-p border may fall on either side


@dataclass(frozen=True)
class Params:
    temperature: float = 1.0
    top_k: int | None = 0
    top_p: float | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    is_greedy: bool = False


CASES = [
    Params(),
    Params(temperature=0.7),
    Params(temperature=1e-8),
    Params(temperature=1e-300),
    Params(temperature=1e30),
    Params(temperature=math.inf),
    Params(top_k=1),
    Params(top_k=5),
    Params(temperature=1.9, top_k=50),
    Params(top_k=1000),
    Params(top_p=0.0),
    Params(top_p=0.01),
    Params(temperature=0.6, top_p=0.5),
    Params(top_p=0.9),
    Params(temperature=5.0, top_p=0.95),
    Params(top_p=0.999),
    Params(temperature=1e300, top_p=0.7),
    Params(top_p=1.0),
    Params(min_p=0.1),
    Params(min_p=1.0),
    Params(temperature=1e30, min_p=0.3),
    Params(temperature=math.inf, min_p=1.0),
    Params(top_p=0.8, min_p=0.05),
    Params(temperature=0.6, top_k=20, top_p=0.95, min_p=0.02),
    Params(temperature=3.0, top_k=50, top_p=0.5),
    Params(temperature=1e30, top_k=50, top_p=0.5),
    Params(is_greedy=True),
]
VOCABS = [1, 2, 17, 300, 1031]


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks and tiles of 256 ids: small rows have several, and interpret fast."""
    monkeypatch.setattr(sampling_arrays, "CHUNK", 256)
    monkeypatch.setattr(kernel, "CHUNK", 256)
    monkeypatch.setattr(kernel, "_TILE", 256)


def make_arrays(rows: Sequence[SamplingRow]) -> tuple[SamplingArrays, torch.Tensor]:
    arrays = SamplingArrays.allocate(len(rows), "cpu")
    for index, row in enumerate(rows):
        params = row.params
        arrays.temperature[index] = params.temperature
        arrays.top_k[index] = params.top_k or 0
        arrays.top_p[index] = 1.0 if params.top_p is None else params.top_p
        arrays.min_p[index] = params.min_p
        for name, word in (("seed_low", row.seed), ("seed_high", row.seed >> 32)):
            bits = np.array([word & 0xFFFFFFFF], np.uint32).view(np.int32)
            getattr(arrays, name)[index] = int(bits[0])
        arrays.stream[index] = row.stream
        arrays.greedy[index] = int(params.is_greedy)
    positions = torch.tensor([row.position for row in rows], dtype=torch.int32)
    return arrays, positions


def draw(logits: np.ndarray, rows: Sequence[SamplingRow], slots: int = 32) -> list[int]:
    """Tokens of the kernels; what surrounds them in `out` must stay."""
    count, vocab = logits.shape
    scratch = SamplingScratch.allocate(count, vocab, "cpu", slots=slots)
    out = torch.full((count * 2 + 3,), -9, dtype=torch.int32)
    arrays, positions = make_arrays(rows)
    with np.errstate(all="ignore"):
        run_launches(
            kernel.sample(
                torch.from_numpy(logits), out, scratch, count, arrays, positions, stride=2, offset=3
            )
        )
    assert (out[:3] == -9).all()
    assert (out[4::2] == -9).all()
    return out[3::2].tolist()


def take_best(logits: np.ndarray) -> list[int]:
    rows, vocab = logits.shape
    scratch = SamplingScratch.allocate(rows, vocab, "cpu")
    out = torch.full((rows,), -9, dtype=torch.int32)
    for _ in range(2):  # the second launch finds the scratch as the first left it
        run_launches([kernel.argmax(torch.from_numpy(logits), out, scratch, rows)])
    assert not scratch.keys.any() and not scratch.arrivals.any()
    return out.tolist()


def make_rows(params: Params, count: int, seed: int) -> list[SamplingRow]:
    generator = np.random.default_rng(seed)
    return [
        SamplingRow(
            params,
            int(generator.integers(2**64, dtype=np.uint64)),
            int(generator.integers(2**31)),
            stream=index % 3,
        )
        for index in range(count)
    ]


def make_logits(vocab: int, seed: int) -> np.ndarray:
    """Flat, ordinary and peaked rows, each also with ties, and one with banned ids."""
    generator = np.random.default_rng(seed)
    rows = [generator.standard_normal(vocab) * scale for scale in (0, 1, 4, 30)]
    banned = np.where(generator.random(vocab) < 0.5, -np.inf, rows[1])
    return np.array([*rows, *map(np.round, rows), banned], np.float32)


def is_border_tie(logits: np.ndarray, row: SamplingRow) -> bool:
    """True where rounding decides which ids top-p keeps: some tail holds 1 - top_p exactly."""
    params = row.params
    if params.top_p is None:
        return False
    _, scores = survivors(logits, replace(params, top_p=None, min_p=0.0))
    probs = np.sort(np.exp(scores))
    distance = abs(probs.cumsum() / probs.sum() - (1 - params.top_p))
    return bool((distance < MASS_TOLERANCE).any())


@pytest.mark.parametrize("vocab", VOCABS)
def test_tokens_equal_the_reference(vocab: int, small_chunks: None):
    compare(vocab, CASES)


def test_tokens_equal_the_reference_with_the_chunks_of_a_real_vocabulary():
    compare(9001, CASES[::5])


def compare(vocab: int, cases: Sequence[Params]) -> None:
    """Every token, except in rows where rounding decides what top-p keeps: those are counted."""
    batches, rows = [], []
    for seed, params in enumerate(cases):
        logits = make_logits(vocab, seed)
        batches.append(logits)
        rows += make_rows(params, len(logits), seed)
    logits = np.concatenate(batches)
    found, wanted = draw(logits, rows), sample_rows(logits, rows)
    ties = 0
    for index, row in enumerate(rows):
        if is_border_tie(logits[index], row):
            ties += 1
        else:
            assert found[index] == wanted[index], (row.params, index % 9)
    assert ties < 0.3 * len(rows)


@pytest.mark.parametrize(
    ("params", "count"),
    [
        (Params(), 2000),
        (Params(temperature=4.0, top_k=20), 60),
        (Params(top_p=0.9, min_p=0.01), 60),
    ],
)
def test_many_draws_from_one_row_equal_the_reference(
    params: Params, count: int, small_chunks: None
):
    """Every seed puts other ids near the best."""
    row = (np.random.default_rng(3).standard_normal((1, 40)) * 2).astype(np.float32)
    rows = [SamplingRow(params, seed, 3 * seed) for seed in range(count)]
    logits = np.repeat(row, count, axis=0)
    found = draw(logits, rows)
    assert found == sample_rows(logits, rows).tolist()
    assert len(set(found)) > 2


def test_draws_follow_the_distribution(small_chunks: None):
    """2,000 draws: no gap between frequency and probability exceeds 4 sigma."""
    logits = (np.random.default_rng(1).standard_normal(23) * 1.5).astype(np.float32)
    rows = [SamplingRow(Params(temperature=1.3), 7, position) for position in range(2000)]
    found = np.array(draw(np.repeat(logits[None], len(rows), axis=0), rows))
    wanted = processed_probs(logits, rows[0])
    counts = np.bincount(found, minlength=23) / len(rows)
    sigma = np.sqrt(wanted * (1 - wanted) / len(rows))
    assert (abs(counts - wanted) <= 4 * sigma).all()


def test_rows_that_share_scratch_do_not_disturb_each_other(small_chunks: None):
    logits = np.concatenate([make_logits(300, seed) for seed in range(3)])
    rows = make_rows(Params(temperature=2.0, top_k=40, top_p=0.95), len(logits), 5)
    assert draw(logits, rows, slots=2) == draw(logits, rows) == sample_rows(logits, rows).tolist()


@pytest.mark.parametrize("vocab", [1, 5, 4096, 8193])
def test_argmax_equals_the_reference(vocab: int):
    """Ties, infinities, NaN of both signs and zeros of both signs included."""
    logits = np.concatenate([make_logits(vocab, 0), make_logits(vocab, 1)])
    logits[0] = -np.inf
    logits[1, vocab // 2] = np.nan
    logits[2, -1] = -np.float32(np.nan)
    logits[3] = -1
    logits[3, vocab // 3 :] = 0
    logits[3, vocab // 3] = -0.0
    logits[5, vocab // 2 :] = np.inf
    assert take_best(logits) == argmax_rows(logits).tolist()


@pytest.mark.parametrize("params", [Params(), Params(top_k=3), Params(is_greedy=True)], ids=str)
def test_rows_with_nan_draw_nothing_and_banned_rows_draw_the_first_id(
    params: Params, small_chunks: None
):
    logits = make_logits(300, 0)[:4]
    logits[0, 7] = np.nan
    logits[1, :] = -np.inf
    logits[2, :] = -np.inf
    logits[2, 9] = -1e38
    rows = make_rows(params, 4, 0)
    found = draw(logits, rows)
    assert found[:3] == [-1, 0, 9]
    assert found[3] == sample_rows(logits, rows)[3]


def test_requests_and_positions_of_rows_follow_from_their_place(small_chunks: None):
    """Row r draws request r // per_request's token at position + first + r % per_request."""
    logits = make_logits(300, 4)[:6]
    requests = make_rows(Params(temperature=1.5), 2, 8)
    arrays, positions = make_arrays(requests)
    out = torch.zeros(6, dtype=torch.int32)
    scratch = SamplingScratch.allocate(6, 300, "cpu")
    run_launches(
        kernel.sample(
            torch.from_numpy(logits), out, scratch, 6, arrays, positions, per_request=3, first=2
        )
    )
    rows = [
        replace(requests[index // 3], position=requests[index // 3].position + 2 + index % 3)
        for index in range(6)
    ]
    assert out.tolist() == sample_rows(logits, rows).tolist()


@pytest.mark.parametrize("vocab", [300, 32000, 128256, 151936, 152064])
def test_sampling_kernels_compile_without_spills(vocab: int):
    for spec in kernel.kernels(vocab):
        assert compile_kernel(spec).local_bytes == 0, spec.name
