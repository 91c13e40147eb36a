"""Typical acceptance against a transcription of the published code, alone and in a whole loop."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.tiny_heads import METHODS, build_with_heads
from support.tiny_pair import MAX_SEQ_LEN, VOCAB
from support.trees import random_parents

from llmctl.errors import BadConfig
from llmctl.plugins.backends.cpu import CpuSampling
from llmctl.plugins.ops.sampling.reference import ReferenceSampling
from llmctl.runtime.api.executor import Executor, ExecutorConfig, KvCacheConfig
from llmctl.runtime.drafting.draft_engine.drafter import DraftEngineDrafter
from llmctl.runtime.drafting.drafts import ROOT, Drafts
from llmctl.runtime.generate import verify
from llmctl.runtime.generate.accept import accept_typical
from llmctl.runtime.request import Request, SamplingConfig, TypicalAcceptance

RULE = TypicalAcceptance()
ANYTHING = TypicalAcceptance(1e-30, 1e-30)  # every draft that is possible at all


def evaluate_posterior(logits, candidates, temperature, posterior_threshold, posterior_alpha):
    """FasterDecoding/Medusa, medusa/model/utils.py, the branch "typical" with fast=True, in numpy:
    (best candidate, accepted drafts) of logits [candidates, 1 + drafts, vocab] and tokens
    candidates [candidates, 1 + drafts], of which the first is the root. -1 pads short ones."""
    scaled = logits[:, :-1] / temperature
    posterior = np.exp(scaled - scaled.max(-1, keepdims=True))
    posterior /= posterior.sum(-1, keepdims=True)
    index = candidates[:, 1:, None]
    candidates_prob = np.take_along_axis(posterior, np.maximum(index, 0), -1)[..., 0]
    entropy = -np.sum(posterior * np.log(posterior + 1e-5), axis=-1)
    threshold = np.minimum(
        np.ones_like(entropy) * posterior_threshold, np.exp(-entropy) * posterior_alpha
    )
    mask = (candidates_prob > threshold) & (candidates[:, 1:] >= 0)
    accept_lengths = np.cumprod(mask, axis=1).sum(axis=1)
    accept_length = accept_lengths.max()
    if accept_length == 0:
        return 0, 0
    best = np.where(accept_lengths == accept_length)[0]
    likelihood = np.log(candidates_prob[best, :accept_length]).sum(axis=-1)
    return best[np.argmax(likelihood)], accept_length


def published_path(drafts: Drafts, logits, config: SamplingConfig) -> list[int]:
    """Its answer for a tree, all of whose nodes end a candidate. logits [1 + drafts, vocab]."""
    rule = config.typical_acceptance or RULE
    paths = [list(drafts.path_to(node)) for node in range(len(drafts.tokens))]
    width = max(map(len, paths))
    candidates = np.full((len(paths), 1 + width), -1)
    rows = np.zeros((len(paths), 1 + width), np.int64)
    for number, path in enumerate(paths):
        candidates[number, 1 : 1 + len(path)] = [drafts.tokens[node] for node in path]
        rows[number, 1 : 1 + len(path)] = [1 + node for node in path]
    best, count = evaluate_posterior(
        logits[rows], candidates, config.temperature, rule.threshold, rule.alpha
    )
    return paths[best][:count]


def softmax(logits):
    shifted = np.exp(logits - logits.max(-1, keepdims=True))
    return shifted / shifted.sum(-1, keepdims=True)


@pytest.mark.parametrize("sharpness", [0.5, 2.0, 4.0])
@pytest.mark.parametrize("rule", [RULE, TypicalAcceptance(0.3, 0.09), ANYTHING])
def test_paths_are_those_of_the_published_code(sharpness, rule):
    """Trees and chains; from flat distributions, whose limit is low, to sharp ones."""
    generator = np.random.default_rng(1)
    lengths = set()
    for seed in range(200):
        parents = random_parents(int(generator.integers(1, 12)), seed)
        siblings = [sum(p == parent for p in parents[:i]) for i, parent in enumerate(parents)]
        logits = sharpness * generator.normal(size=(1 + len(parents), 20))
        # distinct among siblings: the likeliest tokens behind the parent, in this order
        ranks = np.argsort(-logits, axis=-1)
        tokens = [int(ranks[1 + parents[i], siblings[i]]) for i in range(len(parents))]
        config = SamplingConfig(temperature=0.7, top_k=0, typical_acceptance=rule)
        drafts = Drafts.of(tokens, parents)
        found = accept_typical(drafts, softmax(logits / 0.7), rule.threshold, rule.alpha)
        assert list(found) == published_path(drafts, logits, config)
        lengths.add(len(found))
    assert len(lengths) > 2, "paths of several lengths"


def test_a_draft_at_the_limit_is_rejected():
    """p must be greater, as published: flat over 4 tokens, exp(-entropy) is about 1/4."""
    flat = np.full((2, 4), 0.25)
    limit = float(np.exp((flat[0] * np.log(flat[0] + 1e-5)).sum()))
    assert list(accept_typical(Drafts([2]), flat, 0.25, 1.0)) == []
    assert list(accept_typical(Drafts([2]), flat, 0.2499, 1.0)) == [0]
    assert list(accept_typical(Drafts([2]), flat, 1.0, 0.25 / limit)) == []
    assert list(accept_typical(Drafts([2], [ROOT]), flat, 1.0, 0.2499 / limit)) == [0]


def test_nothing_behind_nan_is_kept():
    probs = np.array([[0.5, 0.5], [np.nan, np.nan], [0.5, 0.5]])
    assert list(accept_typical(Drafts([1, 1]), probs, 0.3, 0.3)) == [0]


def test_only_rows_that_a_path_reaches_are_looked_at():
    """The others may be anything, here what has no logarithm: the entropy of a row is a pass over
    the vocabulary."""
    sure, none = np.array([0.0, 0.0, 0.0, 1.0]), np.full(4, -1.0)
    drafts = Drafts([3, 2, 1, 0], [ROOT, ROOT, 1, 2])
    with np.errstate(all="raise"):
        probs = np.stack([sure, none, none, none, none])
        assert list(accept_typical(drafts, probs, 0.09, 0.3)) == [0]
        probs[1] = sure
        chain = accept_typical(Drafts([3, 2, 1, 0]), probs, 0.09, 0.3)
    assert list(chain) == [0]


def seen_by_the_rule(monkeypatch) -> list[tuple[Drafts, np.ndarray, TypicalAcceptance, list[int]]]:
    """(drafts, probabilities, rule, path) of every tree or chain that the rule is applied to."""
    seen = []

    def spy(drafts, probs, threshold, alpha):
        path = accept_typical(drafts, probs, threshold, alpha)
        seen.append((drafts, probs, TypicalAcceptance(threshold, alpha), list(path)))
        return path

    monkeypatch.setattr(verify, "accept_typical", spy)
    return seen


@pytest.mark.parametrize("mode", METHODS)
def test_heads_are_accepted_so_if_asked_for(tmp_path, monkeypatch, mode):
    """Sampled requests that ask get what the rule says of the target's own distribution, in a batch
    with greedy ones that ask too and sampled ones that do not, which get their plain text."""
    seen = seen_by_the_rule(monkeypatch)
    target = build_with_heads(tmp_path, mode)
    draft_len = target.config.build_config["max_draft_len"]
    drafter = METHODS[mode].make_drafter({"target": target}, draft_len)
    generator = np.random.default_rng(2)
    sampled = {"temperature": 0.9, "top_k": 0}
    configs = [
        SamplingConfig(**sampled, seed=1, typical_acceptance=ANYTHING),
        SamplingConfig(**sampled, seed=2, typical_acceptance=RULE),
        SamplingConfig(typical_acceptance=ANYTHING),
        SamplingConfig(**sampled, seed=3),
    ]
    prompts = [tuple(generator.integers(2, VOCAB, 20).tolist()) for _ in configs]
    requests = [Request(p, 40, config) for p, config in zip(prompts, configs, strict=True)]

    def run(drafter, requests):
        config = ExecutorConfig(KvCacheConfig(4 * MAX_SEQ_LEN // 16), check_invariants=True)
        with Executor(target, drafter, config, CpuSampling()) as executor:
            numbers = executor.enqueue_requests(requests)
            return [executor.await_responses(n)[0].result.output_token_ids for n in numbers]

    exact = [replace(config, typical_acceptance=None) for config in configs]
    asked = [replace(r, sampling_config=config) for r, config in zip(requests, exact, strict=True)]
    plain, found = run(None, asked), run(drafter, requests)
    assert seen and all(len(tokens) == 40 for tokens in found)
    assert found[2:] == plain[2:], "neither the greedy request nor the one that did not ask"
    assert found[0] != plain[0], "whatever is drafted is kept"
    assert {rule for _, _, rule, _ in seen} == {RULE, ANYTHING}
    assert any(len(path) < drafts.depth for drafts, _, _, path in seen)
    for drafts, probs, rule, path in seen:
        assert rule is not ANYTHING or len(path) == drafts.depth
        assert probs.shape == (1 + len(drafts.tokens), VOCAB)
        np.testing.assert_allclose(probs.sum(axis=1), 1, atol=1e-6)
        config = SamplingConfig(typical_acceptance=rule)
        with np.errstate(divide="ignore"):
            assert path == published_path(drafts, np.log(probs), config)


def test_the_host_applies_it_and_rounds_leave_it_alone(fake):
    """Requests that ask are run step by step; the device would accept by tokens."""
    engine, draft = fake.Engine(), fake.Engine(agreement=0.5)
    harness = fake.Harness(engine, DraftEngineDrafter(draft, 4), draft=draft, on_device=True)
    config = SamplingConfig(temperature=1.0, top_k=0, typical_acceptance=RULE)
    harness.add(Request((3, 1, 4), 30, config))
    harness.run()
    assert harness.runner.num_rounds == 0
    harness.add(Request((3, 1, 4), 30, SamplingConfig(typical_acceptance=RULE)))
    harness.run()
    assert harness.runner.num_rounds > 0, "a greedy one needs no rule"


@pytest.mark.parametrize("values", [(0, 0.3), (1.5, 0.3), (0.09, 0), (0.09, -1), (float("nan"), 1)])
def test_limits_that_are_no_probabilities_are_refused(values):
    with pytest.raises(BadConfig, match="typical"):
        TypicalAcceptance(*values)


def test_two_lossy_rules_for_one_request_are_refused(fake):
    config = ExecutorConfig(KvCacheConfig(40), acceptance="logits")
    target, drafter = fake.Engine(), DraftEngineDrafter(fake.Engine(), 4)
    typical = SamplingConfig(temperature=1.0, top_k=0, typical_acceptance=RULE)
    with Executor(target, drafter, config, ReferenceSampling()) as executor:
        executor.enqueue_request(Request((3, 1, 4), 5, typical))
        (answer,) = executor.await_responses()
        assert isinstance(answer.error, BadConfig) and "logits" in str(answer.error)


def test_without_drafts_it_is_refused(fake):
    """It would have no effect; a greedy request's has none anywhere."""
    config = ExecutorConfig(KvCacheConfig(40))
    with Executor(fake.Engine(), None, config, ReferenceSampling()) as executor:
        for temperature, is_refused in ((1.0, True), (0.0, False)):
            typical = SamplingConfig(temperature, top_k=0, typical_acceptance=RULE)
            executor.enqueue_request(Request((3, 1, 4), 5, typical))
            (answer,) = executor.await_responses()
            assert isinstance(answer.error, BadConfig) == is_refused, answer
