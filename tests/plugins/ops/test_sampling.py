"""Sampling against oracles we did not write: Random123's vectors and transformers' warpers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from llmctl.plugins.ops.sampling import reference
from llmctl.plugins.ops.sampling.philox import Draw, philox_words, uniform, uniforms
from llmctl.plugins.ops.sampling.reference import (
    draw_from_probs,
    log_softmax_at,
    processed_probs,
    sample_rows,
)
from llmctl.plugins.ops.sampling.spec import (
    ACCEPT_STREAM,
    DRAFT_STREAM,
    MAX_NOISE,
    MIN_NOISE,
    NOISE_SPAN,
    TARGET_STREAM,
    SamplingRow,
)


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


def row(params: Params, seed: int = 0, position: int = 0, **rest: Any) -> SamplingRow:
    return SamplingRow(params, seed, position, **rest)


def sample(logits: np.ndarray, sampling_row: SamplingRow) -> int:
    return int(sample_rows(logits[None], [sampling_row])[0])


# ---- noise ----


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [  # kat_vectors of Random123, philox4x32 10 rounds
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0xFFFFFFFF,) * 4,
            (0xFFFFFFFF,) * 2,
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_known_answers(counter, key, words):
    found = philox_words(np.array(counter, np.uint64)[:, None], np.array(key, np.uint64)[:, None])
    assert tuple(found[:, 0].tolist()) == words


def values(seed: int, position: int, ids: np.ndarray, stream: int = TARGET_STREAM):
    return uniforms([Draw(seed, position, stream, ids)])[0]


@pytest.mark.parametrize("count", [5, 511, 512, 3001])
def test_noise_of_an_id_does_not_depend_on_which_other_ids_are_asked(count):
    whole = values(2**63 + 5, 17, np.arange(count))
    generator = np.random.default_rng(count)
    for size in (1, 4, count // 2, count):
        some = np.sort(generator.choice(count, size, replace=False))
        assert (values(2**63 + 5, 17, some) == whole[some]).all()
    one_by_one = [values(2**63 + 5, 17, np.array([i]))[0] for i in range(0, count, 97)]
    assert one_by_one == whole[::97].tolist()


def test_noise_of_a_draw_does_not_depend_on_the_draws_beside_it():
    draws = [
        Draw(seed, 3 * seed, seed % 3, np.arange(size))
        for seed, size in enumerate((3, 700, 1, 40, 512))
    ]
    together = uniforms(draws)
    for draw, found in zip(draws, together, strict=True):
        assert (uniforms([draw])[0] == found).all()


def test_seed_position_stream_and_id_each_change_the_noise():
    base = uniform(1, 2, ACCEPT_STREAM)
    others = [uniform(1 + 2**32, 2, ACCEPT_STREAM), uniform(2, 2, ACCEPT_STREAM)]
    others += [uniform(1, 3, ACCEPT_STREAM), uniform(1, 2, DRAFT_STREAM)]
    others += values(1, 2, np.arange(1, 9), ACCEPT_STREAM).tolist()
    assert len({base, *others}) == 1 + len(others)


def test_noise_bounds_are_those_of_the_extreme_words():
    extremes = (np.array([0, 2**32 - 1]) + 0.5) * 2.0**-32
    noise = -np.log(-np.log(extremes))
    assert noise == pytest.approx([MIN_NOISE, MAX_NOISE])
    assert pytest.approx(NOISE_SPAN) == noise[1] - noise[0]


@pytest.mark.parametrize("scale", [0.5, 5, 20])
def test_the_token_is_the_argmax_of_scores_plus_noise_over_all_ids(scale):
    """Ids that cannot win are skipped; here none is."""
    generator = np.random.default_rng(0)
    logits = (generator.standard_normal((500, 64)) * scale).astype(np.float32)
    for seed in range(500):
        noise = -np.log(-np.log(values(seed, seed * 3, np.arange(64))))
        wanted = (logits[seed].astype(np.float64) + noise).argmax()
        assert sample(logits[seed], row(Params(), seed, seed * 3)) == wanted


# ---- filters ----


def warped(logits: np.ndarray, params: Params) -> np.ndarray:
    chain = LogitsProcessorList([TemperatureLogitsWarper(float(params.temperature))])
    if params.top_k:
        chain.append(TopKLogitsWarper(params.top_k))
    if params.top_p is not None:
        chain.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        chain.append(MinPLogitsWarper(params.min_p))
    scores = chain(torch.zeros((1, 1), dtype=torch.long), torch.tensor(logits)[None].double())
    return torch.softmax(scores[0], -1).numpy()


@pytest.mark.parametrize(
    "params",
    [
        Params(),
        Params(temperature=0.7),
        Params(temperature=1.9, top_k=1),
        Params(top_k=5),
        Params(top_k=1000),
        Params(top_p=0.9),
        Params(top_p=0.01),
        Params(top_p=1.0),
        Params(min_p=0.1),
        Params(min_p=1.0),
        Params(temperature=0.6, top_k=20, top_p=0.95, min_p=0.02),
        Params(temperature=3.0, top_k=50, top_p=0.5),
    ],
    ids=str,
)
@pytest.mark.parametrize("vocab", [2, 17, 300])
def test_processed_probabilities_equal_transformers(params, vocab):
    generator = np.random.default_rng(vocab)
    for _ in range(25):
        logits = (generator.standard_normal(vocab) * 3).astype(np.float32)
        found = processed_probs(logits, row(params))
        np.testing.assert_allclose(found, warped(logits, params), atol=1e-12)


def test_top_k_keeps_ties_at_the_border_as_transformers_does():
    logits = np.array([1, 3, 2, 2, 0], np.float32)
    params = Params(top_k=2)
    assert np.flatnonzero(processed_probs(logits, row(params))).tolist() == [1, 2, 3]
    np.testing.assert_allclose(processed_probs(logits, row(params)), warped(logits, params))


def test_lower_ids_stay_where_logits_tie_at_the_top_p_border():
    found = processed_probs(np.ones(4, np.float32), row(Params(top_p=0.5)))
    assert found.tolist() == [0.5, 0.5, 0, 0]


def test_repetition_penalty_equals_transformers():
    generator = np.random.default_rng(3)
    logits = generator.standard_normal(50).astype(np.float32)
    tokens = generator.integers(0, 50, 30)
    counts = np.bincount(tokens, minlength=50).astype(np.int32)
    oracle = RepetitionPenaltyLogitsProcessor(1.3)
    wanted = oracle(torch.tensor(tokens)[None], torch.tensor(logits)[None])[0].numpy()
    params = Params(repetition_penalty=1.3)
    np.testing.assert_array_equal(reference.penalise(logits, row(params, counts=counts)), wanted)


def test_presence_and_frequency_penalties_subtract_per_id_and_per_occurrence():
    logits = np.array([1, 1, 1], np.float32)
    counts = np.array([0, 1, 4], np.int32)
    params = Params(presence_penalty=0.5, frequency_penalty=0.25)
    found = reference.penalise(logits, row(params, counts=counts))
    np.testing.assert_allclose(found, [1, 0.25, -0.5])
    assert logits.tolist() == [1, 1, 1]


def test_banned_ids_are_never_drawn_even_when_best():
    logits = np.array([9, 0, 8], np.float32)
    oracle = NoBadWordsLogitsProcessor([[0], [2]])
    scores = oracle(torch.zeros((1, 1), dtype=torch.long), torch.tensor(logits)[None])
    wanted = torch.softmax(scores, -1)[0].numpy()
    found = processed_probs(logits, row(Params(), banned=(0, 2)))
    np.testing.assert_allclose(found, wanted)
    greedy = Params(is_greedy=True)
    assert sample(logits, row(greedy, banned=(0,))) == 2
    assert sample_rows(logits[None], [row(greedy, banned=(0, 2, 99))]).tolist() == [1]


def test_when_everything_is_banned_greedy_and_sampled_rows_both_give_id_0():
    logits = np.array([1, 2], np.float32)
    for params in (Params(is_greedy=True), Params(top_k=2, top_p=0.5, min_p=0.5)):
        assert sample(logits, row(params, banned=(0, 1))) == 0


def test_a_tiny_temperature_draws_the_best_id():
    logits = np.array([1, 3e30, -3e30, 2], np.float32)
    for temperature in (1e-300, 1e-8):
        assert sample(logits, row(Params(temperature=temperature))) == 1


# ---- draws ----


def chi_square_is_plausible(observed: np.ndarray, expected: np.ndarray) -> bool:
    """Within five standard deviations of the chi-square mean (fixed seeds, so no flakes)."""
    used = expected > 0
    assert observed[~used].sum() == 0
    statistic = ((observed - expected)[used] ** 2 / expected[used]).sum()
    freedom = used.sum() - 1
    return bool(abs(statistic - freedom) < 5 * np.sqrt(2 * freedom))


@pytest.mark.parametrize(
    "params", [Params(), Params(temperature=0.5, top_k=6, top_p=0.9)], ids=["plain", "filtered"]
)
def test_draws_follow_the_processed_distribution(params):
    logits = np.random.default_rng(1).standard_normal(16).astype(np.float32)
    drawn = [sample(logits, row(params, seed, 5)) for seed in range(8000)]
    expected = warped(logits, params) * len(drawn)
    assert chi_square_is_plausible(np.bincount(drawn, minlength=16), expected)
    assert not chi_square_is_plausible(np.roll(np.bincount(drawn, minlength=16), 1), expected + 1)


def test_draws_over_positions_of_one_seed_follow_the_distribution_too():
    probs = np.array([0.5, 0.0, 0.3, 0.2])
    drawn = [draw_from_probs(probs, row(Params(), 7, position)) for position in range(8000)]
    assert chi_square_is_plausible(np.bincount(drawn, minlength=4), probs * len(drawn))


def test_a_row_draws_the_same_token_alone_and_in_any_batch():
    generator = np.random.default_rng(2)
    logits = generator.standard_normal((12, 100)).astype(np.float32)
    greedy = Params(is_greedy=True)
    rows = [row(Params() if index % 3 else greedy, index, 40) for index in range(12)]
    together = sample_rows(logits, rows)
    alone = [int(sample_rows(logits[i : i + 1], rows[i : i + 1])[0]) for i in range(12)]
    assert together.tolist() == alone
    shuffled = generator.permutation(12)
    again = sample_rows(logits[shuffled], [rows[i] for i in shuffled])
    assert (again == together[shuffled]).all()


def test_greedy_takes_the_lowest_id_of_a_tie():
    logits = np.array([[0, 2, 2], [5, 5, 5]], np.float32)
    rows = [row(Params(is_greedy=True))] * 2
    assert sample_rows(logits, rows).tolist() == [1, 0]


def test_log_probs_are_the_log_softmax_of_raw_logits():
    logits = (np.random.default_rng(5).standard_normal((4, 30)) * 40).astype(np.float32)
    tokens = [3, 0, 29, 7]
    wanted = torch.log_softmax(torch.tensor(logits).double(), -1)[range(4), tokens]
    assert log_softmax_at(logits, tokens) == pytest.approx(wanted.tolist(), abs=1e-12)
