"""The sampling kernels against the numpy reference, and what they promise beyond it."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from support import sampling as sampling_support
from support.sampling import Params

from llmctl.plugins.backends import cpu
from llmctl.plugins.ops.sampling.philox import Draw, uniforms
from llmctl.plugins.ops.sampling.reference import ReferenceSampling, penalise, survivors
from llmctl.plugins.ops.sampling.spec import SamplingRow

KERNEL, REFERENCE = cpu.CpuSampling(), ReferenceSampling()
MASS_TOLERANCE = 1e-12  # a mass this close to the top-p border may fall on either side


CASES = [
    *sampling_support.CASES,
    Params(temperature=0.8, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.25),
    Params(top_k=40, top_p=0.9, repetition_penalty=0.7),
    Params(is_greedy=True, repetition_penalty=1.3, frequency_penalty=-0.2),
]
VOCABS = [1, 2, 17, 64, 300, 4093, 40000]  # the last is drawn in pieces


@pytest.fixture(params=cpu.instruction_sets())
def isa(request):
    """Each variant of the kernels this CPU can run."""
    cpu.set_instruction_set(request.param)
    yield request.param
    cpu.set_instruction_set(cpu.instruction_sets()[0])


def make_rows(params: Params, vocab: int, count: int, seed: int) -> list[SamplingRow]:
    """Rows with counts; all but the first with banned ids."""
    generator = np.random.default_rng(seed)
    counts = np.where(generator.random(vocab) < 0.1, 3, 0).astype(np.int32)
    return [
        SamplingRow(
            params,
            int(generator.integers(2**63)),
            int(generator.integers(100_000)),
            counts,
            tuple(generator.integers(0, vocab, 2).tolist()) if index else (),
            index % 3,
        )
        for index in range(count)
    ]


def make_logits(vocab: int, count: int, seed: int) -> list[np.ndarray]:
    """Flat, ordinary and peaked rows, each also with ties."""
    normal = np.random.default_rng(seed).standard_normal((count, vocab))
    rows = [(normal * scale).astype(np.float32) for scale in (0, 1, 4, 30)]
    return [*rows, *map(np.round, rows)]


def is_border_tie(logits: np.ndarray, row: SamplingRow) -> bool:
    """True where rounding decides which ids top-p keeps: some tail holds 1 - top_p exactly."""
    params = row.params
    if params.top_p is None:
        return False
    _, scores = survivors(penalise(logits, row), replace(params, top_p=None, min_p=0.0))
    probs = np.sort(np.exp(scores))
    return bool((abs(probs.cumsum() / probs.sum() - (1 - params.top_p)) < MASS_TOLERANCE).any())


@pytest.fixture(scope="module")
def expected():
    """expected(vocab) -> (rows, logits, tokens, probabilities, which are ties at a border) of every
    case by the reference, which all variants are compared with."""

    @cache
    def of(vocab: int):
        found = []
        for seed, params in enumerate(CASES):
            rows = make_rows(params, vocab, 3, seed)
            for logits in make_logits(vocab, 3, seed):
                tokens = REFERENCE.sample_rows(logits, rows)
                probs = REFERENCE.processed_probs(logits, rows)
                ties = [is_border_tie(*pair) for pair in zip(logits, rows, strict=True)]
                found.append((rows, logits, tokens, probs, ties))
        return found

    return of


@pytest.mark.parametrize("vocab", VOCABS)
def test_tokens_and_probabilities_equal_the_reference(isa, vocab, expected):
    """Every token, except in rows where rounding decides what top-p keeps: those are counted."""
    compared = ties = 0
    for rows, logits, wanted_tokens, wanted, border in expected(vocab):
        kept = logits.copy()
        tokens = KERNEL.sample_rows(logits, rows)
        probs = KERNEL.processed_probs(logits, rows)
        assert (logits == kept).all()
        for index, token in enumerate(wanted_tokens):
            compared += 1
            if border[index]:
                ties += 1
                continue
            assert tokens[index] == token, (rows[index].params, index)
            np.testing.assert_allclose(probs[index], wanted[index], rtol=1e-13, atol=1e-300)
    assert compared == len(CASES) * 8 * 3
    assert ties < 0.15 * compared  # rows without a slope are often cut at a tie


def test_long_vocabularies_equal_the_reference_too():
    for params in (Params(temperature=0.8), Params(top_k=50, top_p=0.9), Params(top_p=0.9)):
        rows = make_rows(params, 128256, 2, 0)
        logits = make_logits(128256, 2, 1)[2]
        assert (KERNEL.sample_rows(logits, rows) == REFERENCE.sample_rows(logits, rows)).all()
        found, wanted = (
            KERNEL.processed_probs(logits, rows),
            REFERENCE.processed_probs(logits, rows),
        )
        np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-300)


def test_many_draws_from_one_row_equal_the_reference(isa):
    """Every seed puts other ids near the best; with this many draws, passing over an id that
    could have won would show."""
    generator = np.random.default_rng(3)
    logits = np.repeat((generator.standard_normal((1, 700)) * 2).astype(np.float32), 2000, axis=0)
    for params in (Params(), Params(temperature=4.0), Params(top_k=200)):
        rows = [SamplingRow(params, seed, 3 * seed) for seed in range(2000)]
        tokens = KERNEL.sample_rows(logits, rows)
        assert (tokens == REFERENCE.sample_rows(logits, rows)).all()
        assert len(set(tokens.tolist())) > 50


def test_draws_from_a_distribution_equal_the_reference(isa):
    generator = np.random.default_rng(4)
    for vocab in (1, 3, 130, 5000):
        for index in range(100):
            probs = generator.random(vocab) ** 8 * (generator.random(vocab) < 0.5)
            probs[generator.integers(vocab)] += 0.1
            row = SamplingRow(Params(), index, 7 * index, stream=2)
            probs /= probs.sum()
            assert KERNEL.draw_from_probs(probs, row) == REFERENCE.draw_from_probs(probs, row)


@pytest.mark.parametrize("sign", [-1, 1])
def test_two_ids_a_few_roundings_apart_are_ordered_rightly(isa, sign):
    """Probabilities are chosen so that id 1's perturbed score is id 0's times (1 + 4 ulp): the
    two logarithms of the noise and the one of the probability are that accurate together."""
    for seed in range(2000):
        row = SamplingRow(Params(), seed, 1)
        u = uniforms([Draw(seed, 1, 0, np.arange(2))])[0].tolist()
        share = math.log(u[1]) / math.log(u[0])  # equal races: p1 / p0
        gap = 4 * 2.0**-52 * max(1.0, abs(math.log(share)), abs(math.log(-math.log(u[1]))))
        probs = np.array([1.0, share * (1 + sign * gap)])
        assert KERNEL.draw_from_probs(probs, row) == (sign > 0)


def test_uniforms_are_those_of_the_reference_to_the_bit(isa):
    rows = [
        SamplingRow(Params(), seed, position, stream=stream)
        for seed in (0, 1, 2**32, 2**64 - 1)
        for position in (0, 7, 2**31)
        for stream in (0, 1, 2)
    ]
    assert (KERNEL.uniforms(rows) == REFERENCE.uniforms(rows)).all()


def test_logarithms_are_within_one_rounding(isa):
    """-log(n) by way of n equal logits, which the kernel sums exactly."""
    for count in (2, 3, 5, 10, 99, 181, 182, 1000, 1447, 1449, 4095, 40001):
        found = KERNEL.log_softmax_at(np.zeros((1, count), np.float32), [0])[0]
        assert abs(found + math.log(count)) <= math.ulp(math.log(count))


def test_exponentials_are_within_two_roundings(isa):
    """Ratios of probabilities to the largest, one pair at a time: exp(-x) / 1."""
    distances = np.concatenate([np.linspace(0, 40, 2001), np.linspace(40, 700, 200)])
    for distance in distances.astype(np.float32):
        probs = KERNEL.processed_probs(
            np.array([[0, -distance]], np.float32), [SamplingRow(Params(), 0, 0)]
        )[0]
        wanted = math.exp(-float(distance))
        assert abs(probs[1] / probs[0] - wanted) <= 3 * math.ulp(wanted)  # two divisions included


def test_every_variant_and_number_of_threads_gives_the_same_bits():
    threads = cpu.num_threads()
    found = set()
    logits = [make_logits(vocab, 3, 5)[2] for vocab in (300, 40000)]
    for isa in cpu.instruction_sets():
        for count in (1, 3):
            cpu.set_instruction_set(isa)
            cpu.set_num_threads(count)
            parts = []
            for params in CASES:
                for batch in logits:
                    rows = make_rows(params, batch.shape[1], 3, 0)
                    parts.append(KERNEL.processed_probs(batch, rows).tobytes())
                    parts.append(KERNEL.sample_rows(batch, rows).tobytes())
            found.add(hash(b"".join(parts)))
    cpu.set_num_threads(threads)
    cpu.set_instruction_set(cpu.instruction_sets()[0])
    assert len(found) == 1


@pytest.mark.parametrize("vocab", [100, 40000])
def test_a_row_gives_the_same_alone_and_in_any_batch(vocab):
    generator = np.random.default_rng(2)
    logits = (generator.standard_normal((20, vocab)) * 3).astype(np.float32)
    rows = [make_rows(CASES[index], vocab, 2, index)[index % 2] for index in range(20)]
    together = KERNEL.sample_rows(logits, rows)
    probs = KERNEL.processed_probs(logits, rows)
    for index in range(20):
        alone = logits[index : index + 1], rows[index : index + 1]
        assert KERNEL.sample_rows(*alone)[0] == together[index]
        assert (KERNEL.processed_probs(*alone)[0] == probs[index]).all()
    order = generator.permutation(20)
    again = KERNEL.sample_rows(logits[order], [rows[index] for index in order])
    assert (again == together[order]).all()


def test_when_everything_is_banned_the_token_is_0():
    logits = np.array([[1, 2]], np.float32)
    for params in CASES:
        row = SamplingRow(params, 0, 0, np.zeros(2, np.int32), banned=(0, 1))
        assert KERNEL.sample_rows(logits, [row]).tolist() == [0]
        assert KERNEL.processed_probs(logits, [row]).tolist() == [[1, 0]]


def test_a_row_that_holds_nan_gives_minus_1_beside_rows_that_do_not():
    logits = np.array([[1, np.nan], [1, 2]], np.float32)
    for params in CASES:
        rows = make_rows(replace(params, temperature=1e-8), 2, 1, 0) * 2
        assert KERNEL.sample_rows(logits, rows)[0] == -1
        assert KERNEL.sample_rows(logits, rows)[1] >= 0


def test_a_row_that_holds_infinity_is_drawn_from_by_nobody(isa):
    """Scores would be NaN, of which top-p found no border for ever. Greedy rows have a best id."""
    logits = np.zeros((2, 300), np.float32)
    logits[0, 7] = np.inf
    for params in sorted(CASES, key=lambda params: params.top_p is not None):
        rows = [SamplingRow(params, 3, 5)] * 2
        first = 7 if params.is_greedy else -1
        for backend in (KERNEL, REFERENCE):
            tokens = backend.sample_rows(logits, rows)
            assert tokens[0] == first and tokens[1] >= 0, (params, backend)
        probs = KERNEL.processed_probs(logits, rows)
        assert probs[0].sum() == (first >= 0) and probs[1].sum() == pytest.approx(1)


def test_ids_of_a_larger_vocabulary_are_passed_over():
    logits = np.array([[0, 9, 8, 7]], np.float32)
    counts = np.full(9, 5, np.int32)
    counts[:4] = [0, 50, 0, 0]
    params = Params(is_greedy=True, presence_penalty=5.0)
    for backend in (KERNEL, REFERENCE):
        row = SamplingRow(params, 0, 0, counts, banned=(2, 8))
        assert backend.sample_rows(logits, [row]).tolist() == [3]


def test_log_probs_equal_the_reference(isa):
    for vocab in (1, 30, 5001):
        logits = make_logits(vocab, 4, 0)[3]
        tokens = [0, vocab - 1, vocab // 2, vocab // 3]
        wanted = REFERENCE.log_softmax_at(logits, tokens)
        assert KERNEL.log_softmax_at(logits, tokens) == pytest.approx(wanted, rel=1e-13, abs=1e-13)


@pytest.mark.parametrize("params", [Params(), Params(temperature=0.5, top_k=6, top_p=0.9)], ids=str)
def test_draws_follow_the_processed_distribution(isa, params):
    """Within five standard deviations of the chi-square mean (fixed seeds, so no flakes)."""
    logits = np.random.default_rng(1).standard_normal((1, 16)).astype(np.float32)
    rows = [SamplingRow(params, seed, 5) for seed in range(8000)]
    drawn = KERNEL.sample_rows(np.repeat(logits, 8000, axis=0), rows)
    expected = REFERENCE.processed_probs(logits, rows[:1])[0] * len(rows)
    observed = np.bincount(drawn, minlength=16)
    used = expected > 0
    assert observed[~used].sum() == 0
    statistic = ((observed - expected)[used] ** 2 / expected[used]).sum()
    freedom = used.sum() - 1
    assert abs(statistic - freedom) < 5 * math.sqrt(2 * freedom)
    shifted = np.roll(observed, 1)[used]
    assert ((shifted - expected[used]) ** 2 / expected[used]).sum() > 100 * freedom
