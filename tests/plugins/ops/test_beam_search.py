"""The kernels of a beam search in the interpreter: whole searches against the host's, which tests
of runtime/drafting/redrafter/ compare with slower ones and with published numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from llmctl.plugins.backends.cuda.compiler import compile_kernel
from llmctl.plugins.backends.cuda.interpret import run_launches
from llmctl.plugins.ops.beam_search import kernel
from llmctl.plugins.ops.beam_search.reference import top_log_probs
from llmctl.runtime.drafting.redrafter.beams import search
from llmctl.runtime.drafting.redrafter.packing import merge


class TableHead:
    """A `Head` whose logits follow from a row's number and its tokens."""

    def __init__(self, seed: int, vocab: int, ties: bool) -> None:
        self.seed, self.vocab, self.ties = seed, vocab, ties
        self.paths: list[tuple[int, ...]] = []

    def logits(self) -> torch.Tensor:
        made = []
        for path in self.paths:
            own = np.random.default_rng([self.seed, *path]).normal(size=self.vocab) * 3
            made.append(own.round() if self.ties else own)
        return torch.tensor(np.array(made), dtype=torch.float32)

    def start(self, rows, tokens) -> None:
        self.paths = list(zip(rows.tolist(), tokens.tolist(), strict=True))

    def go_on(self, rows, tokens) -> None:
        pairs = zip(rows.tolist(), tokens.tolist(), strict=True)
        self.paths = [(*self.paths[row], token) for row, token in pairs]

    def first(self, rows, tokens, count):
        self.start(rows, tokens)
        return self._offers(count)

    def next(self, rows, tokens, count):
        self.go_on(rows, tokens)
        return self._offers(count)

    def _offers(self, count):
        ids, log_probs = top_log_probs(self.logits(), count)
        return ids.numpy(), log_probs.numpy()


def run_search(head, rows, roots, length, num_beams, arrays):
    """The search by kernels: what `select` wrote is what the head's next step reads."""
    requests = len(rows)
    tokens = torch.full((requests * num_beams,), 10**6, dtype=torch.int32)
    parents = tokens.clone()
    head.start(rows, roots)
    for step in range(length):
        logits = head.logits()
        run_launches([kernel.offer(logits, arrays, len(logits))])
        run_launches([kernel.select(arrays, requests, step, tokens, parents)])
        head.go_on(parents, tokens)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(
    ("requests", "num_beams", "length", "vocab"),
    [(1, 1, 1, 5), (2, 3, 4, 37), (3, 5, 5, 2100), (1, 16, 2, 4096), (2, 4, 3, 4)],
)
def test_searches_are_the_hosts(requests, num_beams, length, vocab, ties):
    roots = np.arange(requests, dtype=np.int32)
    rows = np.arange(requests, dtype=np.int32) + 7
    wanted = search(TableHead(5, vocab, ties), rows.tolist(), roots.tolist(), [length] * requests,
                    num_beams)  # fmt: skip
    arrays = kernel.BeamArrays.allocate(requests + 1, num_beams, length, vocab, "cpu")
    run_search(TableHead(5, vocab, ties), rows, roots, length, num_beams, arrays)
    found = arrays.history[(length - 1) % 2][:requests]
    assert found.tolist() == [beams.tokens.tolist() for beams in wanted]
    scores = arrays.scores[(length - 1) % 2][:requests]
    assert (scores.diff(dim=1) <= 0).all()

    most = num_beams * length + 3
    drafts, parents = (torch.full((requests, most), -7, dtype=torch.int32) for _ in range(2))
    counts = torch.full((requests,), -7, dtype=torch.int32)
    run_launches([kernel.merge(arrays, requests, length, drafts, parents, counts)])
    for request, beams in enumerate(wanted):
        tree = merge(beams.tokens, 10**6)
        count = len(tree.tokens)
        own = tree.parents or range(-1, count - 1)
        assert counts[request] == count
        assert drafts[request, :count].tolist() == tree.tokens
        assert parents[request, :count].tolist() == [parent + 1 for parent in own]
        assert (drafts[request, count:] == -7).all(), "what is behind them is not touched"


@pytest.mark.parametrize("seed", range(12))
def test_any_beams_become_the_hosts_tree(seed):
    """Few tokens, so that beginnings and whole beams are alike; shorter than there is room for."""
    generator = np.random.default_rng(seed)
    count, length = int(generator.integers(1, 9)), int(generator.integers(1, 7))
    arrays = kernel.BeamArrays.allocate(3, count, length, 64, "cpu")
    known = int(generator.integers(1, length + 1))
    beams = generator.integers(0, int(generator.choice([1, 2, 3, 50])), (3, count, length))
    arrays.history[(known - 1) % 2].copy_(torch.tensor(beams))
    drafts, parents = (torch.zeros((3, count * length), dtype=torch.int32) for _ in range(2))
    counts = torch.zeros(3, dtype=torch.int32)
    run_launches([kernel.merge(arrays, 3, known, drafts, parents, counts)])
    for request in range(3):
        tree = merge(beams[request, :, :known], 10**6)
        size = len(tree.tokens)
        own = tree.parents or range(-1, size - 1)
        assert counts[request] == size and drafts[request, :size].tolist() == tree.tokens
        assert parents[request, :size].tolist() == [parent + 1 for parent in own]


def test_logits_that_are_no_numbers_give_legal_tokens():
    arrays = kernel.BeamArrays.allocate(4, 3, 2, 37, "cpu")
    logits = torch.randn((4, 37), generator=torch.Generator().manual_seed(0))
    logits[0], logits[1], logits[2, ::2] = torch.nan, -torch.inf, torch.inf
    tokens, rows = (torch.full((12,), -1, dtype=torch.int32) for _ in range(2))
    run_launches([kernel.offer(logits, arrays, 4)])
    run_launches([kernel.select(arrays, 4, 0, tokens, rows)])
    assert ((tokens >= 0) & (tokens < 37)).all()
    assert rows.tolist() == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3
    assert all(len(set(own)) == 3 for own in tokens.view(4, 3).tolist())


@pytest.mark.parametrize(("num_beams", "length", "vocab"), [(4, 5, 128256), (64, 16, 32000)])
def test_kernels_compile_without_spills(num_beams, length, vocab):
    for spec in kernel.kernels(num_beams, length, vocab, num_beams * length):
        assert compile_kernel(spec).local_bytes == 0, spec.name
