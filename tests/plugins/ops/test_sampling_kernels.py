"""The sampling kernels: interpreted, against the numpy reference, and as compiled code."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.kernel import compile_all
from support.sampling import CASES, Params, is_border_tie, make_arrays, make_logits, make_rows

from llmctl.plugins.backends.cuda.compiler import compile_kernel
from llmctl.plugins.backends.cuda.interpret import run_launches
from llmctl.plugins.device_loop import kernel as rounds
from llmctl.plugins.ops.sampling import arrays as sampling_arrays
from llmctl.plugins.ops.sampling import kernel
from llmctl.plugins.ops.sampling.arrays import DrawnRows, SamplingScratch
from llmctl.plugins.ops.sampling.reference import argmax_rows, processed_probs, sample_rows
from llmctl.plugins.ops.sampling.spec import SamplingRow

VOCABS = [1, 2, 17, 300]


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks and tiles of 256 ids: small rows have several, and interpret fast."""
    monkeypatch.setattr(sampling_arrays, "CHUNK", 256)
    monkeypatch.setattr(kernel, "CHUNK", 256)
    monkeypatch.setattr(kernel, "_TILE", 256)


def draw(
    logits: np.ndarray,
    rows: Sequence[SamplingRow],
    slots: int = 32,
    has_wide: bool | None = None,
) -> list[int]:
    """Tokens of the kernels; what surrounds them in `out` must stay."""
    if has_wide is None:
        has_wide = any(kernel.is_wide(row.params, logits.shape[1]) for row in rows)
    count, vocab = logits.shape
    scratch = SamplingScratch.allocate(count, vocab, "cpu", slots=slots)
    out = torch.full((count * 2 + 3,), -9, dtype=torch.int32)
    drawn = DrawnRows(count, *make_arrays(rows), stride=2, offset=3)
    with np.errstate(all="ignore"):
        run_launches(
            kernel.sample(torch.from_numpy(logits), out, scratch, drawn, has_wide=has_wide)
        )
    for zero in (scratch.arrivals, scratch.settled, scratch.histogram, scratch.totals):
        assert not zero.any()  # as the next launch must find them
    assert (out[:3] == -9).all()
    assert (out[4::2] == -9).all()
    return out[3::2].tolist()


def take_best(logits: np.ndarray) -> list[int]:
    rows, vocab = logits.shape
    scratch = SamplingScratch.allocate(rows, vocab, "cpu")
    out = torch.full((rows,), -9, dtype=torch.int32)
    for _ in range(2):  # the second launch finds the scratch as the first left it
        run_launches([kernel.argmax(torch.from_numpy(logits), out, scratch, rows)])
    assert not scratch.keys.any()
    return out.tolist()


@pytest.mark.parametrize("vocab", VOCABS)
def test_tokens_equal_the_reference(vocab: int, small_chunks: None):
    """Every case is drawn from: those of one chunk take a fifth of the time of two."""
    compare(vocab, {17: CASES, 300: CASES[::2]}.get(vocab, CASES[::3]))


def test_tokens_equal_the_reference_where_many_candidates_are_narrowed(small_chunks: None):
    compare(1031, CASES[3::10])


def test_tokens_equal_the_reference_with_the_chunks_of_a_real_vocabulary():
    compare(5001, CASES[::8])


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
        (Params(), 200),
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
    """400 draws: no gap between frequency and probability exceeds 4 sigma."""
    logits = (np.random.default_rng(1).standard_normal(23) * 1.5).astype(np.float32)
    rows = [SamplingRow(Params(temperature=1.3), 7, position) for position in range(400)]
    found = np.array(draw(np.repeat(logits[None], len(rows), axis=0), rows))
    wanted = processed_probs(logits, rows[0])
    counts = np.bincount(found, minlength=23) / len(rows)
    sigma = np.sqrt(wanted * (1 - wanted) / len(rows))
    assert (abs(counts - wanted) <= 4 * sigma).all()


def test_rows_that_share_scratch_do_not_disturb_each_other(small_chunks: None):
    logits = np.concatenate([make_logits(300, seed) for seed in range(2)])
    rows = make_rows(Params(temperature=2.0, top_k=40, top_p=0.95), len(logits), 5)
    assert draw(logits, rows, slots=2) == draw(logits, rows) == sample_rows(logits, rows).tolist()


@pytest.mark.parametrize(
    "params",
    [Params(top_p=0.613), Params(temperature=1e30, top_p=0.613), Params(min_p=0.2)],
    ids=str,
)
def test_wide_filters_draw_the_same_by_all_chunks_and_by_one_thread_block(
    params: Params, small_chunks: None
):
    logits = np.ascontiguousarray(make_logits(300, 2)[1::3])
    rows = make_rows(params, len(logits), 6)
    wanted = sample_rows(logits, rows).tolist()
    assert draw(logits, rows, has_wide=True) == draw(logits, rows, has_wide=False) == wanted


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
    drawn = DrawnRows(6, *make_arrays(requests), per_request=3, first=2)
    out = torch.zeros(6, dtype=torch.int32)
    scratch = SamplingScratch.allocate(6, 300, "cpu")
    run_launches(kernel.sample(torch.from_numpy(logits), out, scratch, drawn, has_wide=False))
    rows = [
        replace(requests[index // 3], position=requests[index // 3].position + 2 + index % 3)
        for index in range(6)
    ]
    assert out.tolist() == sample_rows(logits, rows).tolist()


@pytest.mark.parametrize("vocab", [300, 128256])
def test_sampling_kernels_compile_without_spills(vocab: int):
    """Of others: tests/gpu/test_builds_compiled.py."""
    for spec in kernel.kernels(vocab):
        assert compile_kernel(spec).local_bytes == 0, spec.name


def waiting_loop(machine_code: str) -> str:
    """From where threads look again for others' numbers to where they branch back to look again."""
    found = re.findall(r"/\*([0-9a-f]{4,})\*/ +(.+?) *;", machine_code)
    code = [(int(address, 16), text) for address, text in found]
    look = max(address for address, text in code if ".STRONG.SYS" in text)
    for end, text in code:
        target = re.search(r"BRA 0x([0-9a-f]+)", text)
        if target and end > look >= int(target[1], 16):
            return "\n".join(text for at, text in code if int(target[1], 16) <= at <= end)
    raise AssertionError("no loop around what is looked for")


@pytest.mark.parametrize("vocab", [4096, 32000, 65536, 128256, 262144])
def test_threads_that_wait_for_keys_find_them_together(vocab: int):
    specs = [kernel._argmax_spec(vocab), rounds._draw_spec(8, vocab)]
    for spec, _, machine_code in compile_all(specs):
        assert "BAR.SYNC" in waiting_loop(machine_code), f"{spec.name}: its warps wait apart"
