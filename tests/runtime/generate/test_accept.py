"""The accept rules as functions, then as the distribution of what a whole loop emits."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import (
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from llmctl.plugins.backends.cpu import CpuSampling
from llmctl.plugins.ops.sampling import reference
from llmctl.plugins.ops.sampling.reference import ReferenceSampling
from llmctl.plugins.ops.sampling.spec import SamplingBackend
from llmctl.runtime.drafting.draft_engine.drafter import DraftEngineDrafter
from llmctl.runtime.drafting.drafts import ROOT, Drafts
from llmctl.runtime.generate import verify
from llmctl.runtime.generate.accept import accept_logits, accept_tokens
from llmctl.runtime.request import Request, SamplingConfig

P = np.array([[0.5, 0.3, 0.2, 0.0], [0.1, 0.2, 0.3, 0.4], [0.25, 0.25, 0.25, 0.25]])
Q = np.array([[0.2, 0.2, 0.3, 0.3], [0.4, 0.3, 0.2, 0.1]])


def test_by_tokens_the_run_ends_at_the_first_difference():
    target = [4, 5, 6]
    for drafts, wanted in (([4, 5], (2, 6)), ([4, 9], (1, 5)), ([9, 5], (0, 4)), ([], (0, 4))):
        path, token = accept_tokens(Drafts(drafts), target)
        assert (list(path), token) == (list(range(wanted[0])), wanted[1])


#   root - 4 - 5 - 6      tokens 0, 2, 4 of the tree
#        \   \ 7          token 3
#         8               token 1
TREE = Drafts([4, 8, 5, 7, 6], [ROOT, ROOT, 0, 0, 2])


@pytest.mark.parametrize(
    ("target", "wanted"),
    [
        ([4, 5, 0, 6, 0, 9], ([0, 2, 4], 9)),
        ([4, 7, 0, 6, 3, 9], ([0, 3], 3)),
        ([8, 5, 2, 6, 3, 9], ([1], 2)),
        ([9, 5, 2, 6, 3, 9], ([], 9)),
        ([4, 9, 2, 6, 3, 9], ([0], 9)),
    ],
)
def test_a_tree_is_walked_down_while_a_child_is_the_targets_own_token(target, wanted):
    """target[0] follows the root, target[1 + i] token i."""
    assert accept_tokens(TREE, target) == wanted


def test_a_chain_written_as_a_tree_is_accepted_as_the_chain():
    generator = np.random.default_rng(1)
    for _ in range(200):
        length = int(generator.integers(0, 6))
        tokens = generator.integers(0, 3, length).tolist()
        target = generator.integers(0, 3, length + 1).tolist()
        chain, tree = Drafts(tokens), Drafts(tokens, list(range(-1, length - 1)))
        path, token = accept_tokens(chain, target)
        assert accept_tokens(tree, target) == (list(path), token)
        assert [list(tree.path_to(i)) for i in range(length)] == [
            list(chain.path_to(i)) for i in range(length)
        ]


def test_drafts_that_do_not_branch_are_a_chain():
    assert Drafts.of([], []) == Drafts()
    assert Drafts.of([5, 6, 7], [ROOT, 0, 1]) == Drafts([5, 6, 7])
    for parents in ([ROOT, 0, 0], [ROOT, ROOT, 1]):
        assert Drafts.of([5, 6, 7], parents).parents == parents


@pytest.mark.parametrize("parents", [[0], [-1, 1], [-2], [-1, -1, 3]])
def test_a_tree_has_parents_before_children(parents):
    with pytest.raises(AssertionError):
        Drafts([1] * len(parents), parents)


def test_by_logits_the_first_token_follows_the_target_over_a_grid_of_uniforms():
    grid = (np.arange(4000) + 0.5) / 4000
    emitted = np.zeros(4)
    for draft in range(4):
        for u in grid:
            kept, probs = accept_logits([draft, 0], Q, P, np.array([u, 0.999999]))
            first = np.eye(4)[draft] if kept else probs
            emitted += Q[0, draft] * first / len(grid)
    np.testing.assert_allclose(emitted, P[0], atol=2e-3)


def test_by_logits_equal_models_keep_everything():
    for drafts in itertools.product(range(4), repeat=2):
        kept, probs = accept_logits(drafts, P[1:] + 0, P[[1, 2, 0]], np.array([0.999, 0.999]))
        assert kept == 2
        np.testing.assert_array_equal(probs, P[0])


def test_by_logits_a_token_the_target_never_emits_is_never_kept():
    kept, probs = accept_logits([3, 0], Q, P, np.array([0.0, 0.0]))
    assert kept == 0
    assert probs[3] == 0


def test_by_logits_a_rejection_ends_the_run_even_when_later_drafts_match():
    kept, _ = accept_logits([2, 3], Q, P, np.array([0.9, 0.0]))
    assert kept == 0


def test_by_logits_a_rejection_by_rounding_alone_draws_from_the_target():
    p = np.array([[0.5, 0.5], [0.5, 0.5]])
    kept, probs = accept_logits([0], p[:1] * (1 + 1e-15), p, np.array([1.0]))
    assert kept == 0
    np.testing.assert_array_equal(probs, p[0])


# ---- the joint distribution of three tokens, against exact enumeration ----

VOCAB, NUM_SEQUENCES, PROMPT = 4, 4000, (1, 2)


@pytest.fixture
def known_survivors(monkeypatch):
    """The reference filters rows of four tokens, which come again and again, once each."""
    found, filtered = {}, reference.survivors

    def survivors(logits, params):
        key = (logits.tobytes(), params.temperature, params.top_k, params.top_p, params.min_p)
        if key not in found:
            found[key] = filtered(logits, params)
        return found[key]

    monkeypatch.setattr(reference, "survivors", survivors)


CONFIG = {"temperature": 4.0, "top_k": 3, "top_p": 0.95}


def exact_joint(engine) -> np.ndarray:
    """[V, V, V] probabilities of the first three tokens, with transformers' warpers."""
    warpers = [
        TemperatureLogitsWarper(CONFIG["temperature"]),
        TopKLogitsWarper(CONFIG["top_k"]),
        TopPLogitsWarper(CONFIG["top_p"]),
    ]

    def probs(tokens):
        scores = torch.tensor(engine.logits(np.array(tokens)))[None].double()
        for warper in warpers:
            scores = warper(torch.zeros((1, 1), dtype=torch.long), scores)
        return torch.softmax(scores[0], -1).numpy()

    joint = np.zeros((VOCAB,) * 3)
    first = probs(PROMPT)
    for a in np.flatnonzero(first):
        second = probs((*PROMPT, a))
        for b in np.flatnonzero(second):
            joint[a, b] = first[a] * second[b] * probs((*PROMPT, a, b))
    return joint


def sampled_joint(
    fake, agreement: float, draft_len: int, by_logits: bool, sampling: SamplingBackend
) -> tuple:
    """Counts [V, V, V] over seeds, from whole runs of the loop, and the share accepted."""
    size = {"vocab_size": VOCAB, "max_batch_size": 50, "max_num_tokens": 512}
    target, draft = fake.Engine(**size), fake.Engine(**size, agreement=agreement)
    drafter = DraftEngineDrafter(draft, draft_len)
    harness = fake.Harness(target, drafter, num_blocks=400, by_logits=by_logits, sampling=sampling)
    sequences = [
        # A fourth token leaves room for a round of two drafts after the first.
        harness.add(Request(PROMPT, 4, SamplingConfig(seed=seed, **CONFIG)))
        for seed in range(NUM_SEQUENCES)
    ]
    while harness.scheduler.has_work:
        harness.loop.step()
    counts = np.zeros((VOCAB,) * 3)
    for sequence in sequences:
        counts[tuple(sequence.tokens[len(PROMPT) :][:3])] += 1
    return target, counts, harness.loop.stats.acceptance_rate


def deviation(counts: np.ndarray, joint: np.ndarray) -> float:
    """Standard deviations of the chi-square statistic above its mean; inf if impossible."""
    expected = joint * counts.sum()
    used = expected > 0
    if counts[~used].any():
        return float("inf")
    statistic = ((counts - expected)[used] ** 2 / expected[used]).sum()
    freedom = used.sum() - 1
    return float((statistic - freedom) / np.sqrt(2 * freedom))


@pytest.mark.usefixtures("known_survivors")
@pytest.mark.parametrize("sampling", [ReferenceSampling(), CpuSampling()], ids=["numpy", "cpu"])
@pytest.mark.parametrize("by_logits", [False, True], ids=["by tokens", "by logits"])
@pytest.mark.parametrize(("agreement", "draft_len"), [(0.6, 2), (0.0, 1)])
def test_sampled_drafts_leave_the_target_distribution(
    fake, agreement, draft_len, by_logits, sampling
):
    target, counts, acceptance = sampled_joint(fake, agreement, draft_len, by_logits, sampling)
    assert 0.2 < acceptance < 0.97
    assert deviation(counts, exact_joint(target)) < 4


def typical_acceptance(draft_tokens, draft_probs, target_probs, uniforms):
    """A lossy rule (Medusa's): keep what is not improbable, whatever the draft's own odds."""
    kept = 0
    for token, probs in zip(draft_tokens, target_probs, strict=False):
        entropy = -(probs * np.log(probs + 1e-5)).sum()
        if probs[token] <= min(0.09, 0.3 * np.exp(-entropy)):
            break
        kept += 1
    return kept, target_probs[kept]


@pytest.mark.usefixtures("known_survivors")
def test_a_lossy_rule_fails_the_same_test(fake, monkeypatch):
    monkeypatch.setattr(verify, "accept_logits", typical_acceptance)
    target, counts, _ = sampled_joint(fake, 0.6, 2, True, ReferenceSampling())
    assert deviation(counts, exact_joint(target)) > 20


def test_greedy_requests_are_exact_under_accept_by_logits(fake):
    for agreement in (1.0, 0.5):
        draft = fake.Engine(agreement=agreement)
        drafter = DraftEngineDrafter(draft, 4)
        harness = fake.Harness(fake.Engine(), drafter, draft=draft, by_logits=True)
        sequence = harness.add(Request((3, 1, 4), 40))
        harness.run()
        wanted, _ = fake.plain_answer(harness.target, sequence.request)
        assert sequence.tokens[3:] == wanted
