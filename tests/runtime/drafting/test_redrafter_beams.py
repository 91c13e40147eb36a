"""Beam search against a search over the whole vocabulary, and published numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.beam_reference import NumpyHead, expand_with, log_softmax, slow_search

from llmctl.plugins.ops.beam_search.reference import top_log_probs
from llmctl.runtime.drafting.redrafter.beams import search

GOLDEN = {  # facts of Apple's beam_search_candidates, and of TensorRT-LLM's linear recurrence
    "silu": [
        ([3, 7, 7, 7], [-0.969146, -0.758042, -0.791465], -2.518653),
        ([3, 0, 7, 7], [-1.837506, -0.761780, -0.790285], -3.389571),
        ([3, 7, 7, 6], [-0.969146, -0.758042, -1.697023], -3.424211),
    ],
    "linear": [
        ([3, 5, 7, 5], [-2.036050, -0.077399, -1.158492], -3.271942),
        ([3, 5, 7, 4], [-2.036050, -0.077399, -1.219570], -3.333019),
        ([3, 6, 7, 7], [-2.025122, -0.400537, -0.975535], -3.401194),
    ],
}
SHAPES = {  # in the order that numbers the parameters
    "lm_head.0.linear.bias": (4,),
    "lm_head.0.linear.weight": (4, 4),
    "lm_head.1.weight": (8, 4),
    "rnn_u.bias": (2,),
    "rnn_u.weight": (2, 2),
    "rnn_w.weight": (2, 2),
}
HIDDEN, ROOT = np.array([0.3, -0.7]), 3


def golden_head(recurrence: str) -> NumpyHead:
    tensors = {
        name: np.sin(1 + k + 1.7 * np.arange(np.prod(shape))).reshape(shape)
        for k, (name, shape) in enumerate(SHAPES.items())
    }
    return NumpyHead(recurrence, tensors, np.cos(0.5 + 0.9 * np.arange(16)).reshape(8, 2))


class PathHead:
    """A `Head` whose logits follow from the path: a function for each row of the target."""

    def __init__(self, expands, by_logits=True):
        self.expands, self.by_logits, self.paths = expands, by_logits, []
        self.widths = []

    def _offers(self, count):
        self.widths.append(len(self.paths))
        values = np.array([self.expands[row](path) for row, path in self.paths])
        if self.by_logits:
            ids, log_probs = top_log_probs(torch.tensor(values, dtype=torch.float32), count)
            return ids.numpy(), log_probs.numpy()
        ids = np.argsort(-values, axis=1, kind="stable")[:, :count]
        return ids, np.take_along_axis(values, ids, 1).astype(np.float32)

    def first(self, rows, tokens, count):
        assert rows.dtype == tokens.dtype == np.int32
        pairs = zip(rows.tolist(), tokens.tolist(), strict=True)
        self.paths = [(row, [token]) for row, token in pairs]
        return self._offers(count)

    def next(self, rows, tokens, count):
        assert rows.dtype == tokens.dtype == np.int32
        before = [self.paths[row] for row in rows.tolist()]
        pairs = zip(before, tokens.tolist(), strict=True)
        self.paths = [(row, [*path, token]) for (row, path), token in pairs]
        return self._offers(count)


@pytest.mark.parametrize("recurrence", ["silu", "linear"])
def test_published_beams_are_found(recurrence):
    expand = expand_with(golden_head(recurrence), HIDDEN)
    slow = slow_search(expand, ROOT, 3, 3)
    for own, (tokens, wanted, total) in zip(slow, GOLDEN[recurrence], strict=True):
        path, log_probs, score = own
        assert path == tokens
        assert log_probs == pytest.approx(wanted, abs=2e-6)
        assert score == pytest.approx(total, abs=2e-6)
    (found,) = search(PathHead([expand]), [0], [ROOT], [3], 3)
    assert found.tokens.tolist() == [tokens[1:] for tokens, _, _ in GOLDEN[recurrence]]


@pytest.mark.parametrize("seed", range(40))
def test_beams_are_those_of_a_search_over_the_whole_vocabulary(seed):
    """Of several requests with lengths of their own; every other time with many equal scores."""
    generator = np.random.default_rng(seed)
    vocab, requests = int(generator.integers(2, 12)), int(generator.integers(1, 6))
    num_beams = int(generator.integers(1, min(vocab, 6) + 1))
    lengths = generator.integers(1, 5, requests).tolist()
    has_ties = bool(seed % 2)

    def make(number):
        def expand(path):
            own = np.random.default_rng([seed, number, *path])
            if has_ties:  # eighths: sums are exact
                return -own.integers(0, 3, vocab) / 8
            return own.normal(size=vocab)

        return expand

    expands = [make(number) for number in range(requests)]
    roots = generator.integers(0, vocab, requests).tolist()
    rows = generator.permutation(requests).tolist()
    head = PathHead(expands, by_logits=not has_ties)
    found = search(head, rows, roots, lengths, num_beams)
    for row, root, length, beams in zip(rows, roots, lengths, found, strict=True):
        normalize = (lambda values: values) if has_ties else log_softmax
        wanted = slow_search(expands[row], root, length, num_beams, normalize)
        assert beams.tokens.tolist() == [path[1:] for path, _, _ in wanted]
    assert head.widths[0] == requests and len(head.widths) == max(lengths)
    for step, width in enumerate(head.widths[1:], 1):
        assert width == num_beams * sum(length > step for length in lengths), "none for nothing"


def test_no_requests_are_a_search_too():
    class Unused:
        def first(self, rows, tokens, count):
            assert len(rows) == 0
            return np.empty((0, count), np.int64), np.empty((0, count), np.float32)

    assert search(Unused(), [], [], [], 4) == []


def test_where_logits_tie_the_smaller_id_is_first():
    logits = torch.tensor([[1.0, 3.0, 3.0, -0.0, 0.0, 3.0, -2.0, -2.0]])
    ids, log_probs = top_log_probs(logits, 8)
    assert ids.tolist() == [[1, 2, 5, 0, 3, 4, 6, 7]]
    wanted = torch.log_softmax(logits.double(), 1)[0, ids[0]]
    torch.testing.assert_close(log_probs[0].double(), wanted, rtol=1e-6, atol=1e-6)
    assert top_log_probs(logits, 2)[0].tolist() == [[1, 2]]


def test_log_probs_are_float32_and_ids_legal_whatever_the_logits_are():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn((7, 1000), generator=generator) * 30
    ids, log_probs = top_log_probs(logits, 20)
    assert ids.dtype == torch.int64 and log_probs.dtype == torch.float32
    values, wanted = torch.log_softmax(logits.double(), 1).topk(20)
    assert torch.equal(ids, wanted)
    torch.testing.assert_close(log_probs.double(), values, rtol=1e-5, atol=1e-5)
    for bad in (torch.inf, -torch.inf, torch.nan, -torch.nan):
        odd = logits.clone()
        odd[:, ::3] = bad
        ids = top_log_probs(odd, 20)[0]
        assert int(ids.min()) >= 0 and int(ids.max()) < 1000
        assert all(len(set(row)) == 20 for row in ids.tolist())
