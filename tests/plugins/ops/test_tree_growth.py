"""The kernels of trees that grow in rounds, in the interpreter: against their reference, and whole
trees against the host's, which tests of runtime/drafting/ compare with searches."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.growth_rounds import Round, random_logits, random_round
from support.round_state import UNTOUCHED, make_limits

from llmctl.builder.engine_format import MedusaTree, parse_choices
from llmctl.plugins.backends.cuda.compiler import compile_kernel
from llmctl.plugins.backends.cuda.interpret import run_launches
from llmctl.plugins.device_loop import tree_reference
from llmctl.plugins.ops.beam_search.reference import top_log_probs
from llmctl.plugins.ops.tree_growth import kernel, reference
from llmctl.plugins.ops.tree_growth.arrays import (
    MOST_OFFERS,
    MOST_WIDTH,
    GivenTree,
    GrowthArrays,
    TreeShape,
    growth_bytes,
)
from llmctl.runtime.drafting.drafts import ROOT
from llmctl.runtime.drafting.growth.growth import DynamicShape, Growth, Plant, StaticShape
from llmctl.runtime.drafting.growth.levels import pack_level

VOCAB = 37
CHOICES = [
    parse_choices(text)
    for text in (
        "[[0],[1],[2],[0,0],[0,1],[1,0],[0,0,0],[0,0,1],[0,0,0,0],[1,0,0]]",
        "[[3],[0],[0,2],[3,1],[0,2,0],[3,1,4],[3,1,4,0]]",
        "[[0,0,0]]",
        "[[1]]",
    )
]


def given_shape(choices: MedusaTree) -> TreeShape:
    tree = GivenTree.of(choices.paths)
    return TreeShape(tree.num_offers, tree.width, max(tree.depths), tree)


@st.composite
def rounds(draw: st.DrawFn) -> Round:
    shape = TreeShape(draw(st.integers(1, 6)), draw(st.integers(1, 5)), draw(st.integers(1, 5)))
    if draw(st.booleans()):
        shape = given_shape(draw(st.sampled_from(CHOICES)))
    max_batch = draw(st.integers(1, 4))
    sizes = max_batch, draw(st.integers(2, 14)), draw(st.integers(1, max_batch))
    return random_round(shape, *sizes, draw(st.integers(0, 10**6)), VOCAB)


@settings(max_examples=60, deadline=None)
@given(rounds(), st.booleans(), st.booleans())
def test_levels_are_those_of_the_reference(made: Round, ties: bool, of_pairs: bool) -> None:
    seeded = np.random.default_rng(made.seed)
    num_ids = int(seeded.choice([VOCAB, 5]))
    found, wanted = made.copy(), made.copy()
    for level in range(made.shape.levels(made.draft_len)):
        logits = random_logits(seeded, (made.limits.max_num_rows, VOCAB), ties)
        drawn = torch.from_numpy(seeded.integers(0, 9, len(made.arrays.drawn)))
        options = {"is_root": level == 0, "num_ids": num_ids}
        rows = made.batch * (made.shape.width if level else 1)
        for own in (found, wanted):
            own.arrays.drawn.copy_(drawn)
        run_launches(kernel.offer(logits, found.arrays, rows, **options))
        reference.offer(logits, wanted.arrays, rows, **options)
        assert torch.equal(found.arrays.ids, wanted.arrays.ids)
        torch.testing.assert_close(found.arrays.values, wanted.arrays.values, atol=1e-6, rtol=1e-6)
        found.arrays.values.copy_(wanted.arrays.values)  # sums of another order differ by a bit
        grown = kernel.grow(*found.described, made.draft_len, level, of_pairs=of_pairs)
        run_launches([grown])
        reference.grow(*wanted.described, made.draft_len, level, of_pairs=of_pairs)
        found.assert_same(wanted)


class Model:
    """Logits that follow from the path."""

    def __init__(self, seed: int, ties: bool) -> None:
        self.seed, self.ties = seed, ties

    def logits(self, path: tuple[int, ...]) -> np.ndarray:
        row = np.random.default_rng([self.seed, len(path), *path]).normal(size=VOCAB) * 3
        return (row.round() if self.ties else row).astype(np.float32)


SHAPES = [
    (TreeShape(3, 3, 4), 12),
    (TreeShape(1, 1, 5), 5),
    (TreeShape(10, 10, 8), 31),
    (TreeShape(10, 4, 8), 24),
    (TreeShape(2, 2, 6), 9),
    (TreeShape(4, 4, 1), 4),
    (TreeShape(3, 1, 6), 12),
]


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("end", [-1, 7])
@pytest.mark.parametrize(("shape", "draft_len"), SHAPES)
def test_trees_are_the_hosts(shape: TreeShape, draft_len: int, end: int, ties: bool) -> None:
    assert_trees_are_the_hosts(
        shape, DynamicShape(shape.num_offers, shape.width, shape.depth), draft_len, end, ties
    )


@pytest.mark.parametrize("end", [-1, 7])
@pytest.mark.parametrize("choices", CHOICES)
def test_given_trees_are_the_hosts(choices: MedusaTree, end: int) -> None:
    """Of all lengths; the likeliest tokens do not matter but for their ranks."""
    for draft_len in range(2, choices.num_nodes + 2):
        shape, own = given_shape(choices), StaticShape(choices)
        assert own.depth == shape.depth
        assert_trees_are_the_hosts(shape, own, draft_len, end, ties=False)


def assert_trees_are_the_hosts(
    shape: TreeShape, own: Plant, draft_len: int, end: int, ties: bool
) -> None:
    """Level by level, with the steps that the host packs: their tokens, positions, slots, paths."""
    made = Round(shape, 3, draft_len, 3, 0, VOCAB)
    made.state.committed[1] = 0  # padding between two requests
    made.arrays.ends.fill_(end)
    models = {0: Model(1, ties), 2: Model(2, ties)}
    host: dict[int, Growth] = {}
    for request in models:
        sequence: Any = SimpleNamespace(request=SimpleNamespace(end_id=None if end < 0 else end))
        host[request] = own.tree(sequence, 0, draft_len)
    for level in range(shape.levels(draft_len)):
        logits = torch.full((made.limits.max_num_rows, VOCAB), 1e9)
        rows_of: dict[int, list[int]] = {}
        for request, tree in host.items():
            lines = [[node.token for node in leaf.line()] for leaf in tree.frontier]
            paths = [tuple(line) for line in lines] if level else [()]
            rows_of[request] = [int(made.arrays.rows[request * shape.width + nth])
                                if level else request for nth in range(len(paths))]  # fmt: skip
            for row, path in zip(rows_of[request], paths, strict=True):
                logits[row] = torch.from_numpy(models[request].logits(path))
        made.run(kernel, level, logits, VOCAB, False)
        for request, tree in host.items():
            if rows_of[request]:
                ids, values = top_log_probs(logits[rows_of[request]], tree.num_offers)
                tree.take(ids.tolist(), values.tolist())
        _assert_drafts(made, host)
        if level + 1 < shape.levels(draft_len):
            _assert_step(made, host, level)


def _assert_drafts(made: Round, host: dict[int, Growth]) -> None:
    assert made.trees.counts[1] == 0
    for request, tree in host.items():
        drafts = tree.drafts()
        count = int(made.trees.counts[request])
        assert made.state.drafts[request, :count].tolist() == drafts.tokens
        parents = drafts.parents or list(range(ROOT, count - 1))
        assert made.trees.parents[request, :count].tolist() == [parent + 1 for parent in parents]


def _assert_step(made: Round, host: dict[int, Growth], level: int) -> None:
    step, width = made.step, made.shape.width
    assert step.cu_q[:4].tolist() == [0, width, width, 2 * width]
    for first, (request, tree) in zip((0, width), host.items(), strict=True):
        frontier, size = made.arrays.frontier[request].tolist(), len(tree.frontier)
        assert [bool(node) for node in frontier] == [nth < size for nth in range(width)]
        assert step.logit_rows[request * width :][:width].tolist() == list(
            range(first, first + width)
        )
        is_chain = width == 1
        assert is_chain or (step.slot_mapping[first + size : first + width] == -1).all()
        if not size:
            continue
        table = step.block_tables[request][None].numpy()
        packed = pack_level([tree], np.array([39], np.int32), table, 8)
        for name in ("token_ids", "position_ids", "slot_mapping"):
            assert getattr(step, name)[first:][:size].tolist() == getattr(packed, name).tolist()
        start = int(step.tree_start[request])
        assert (start == -1) == is_chain and step.tree_root[request] == 39
        assert step.kv_len[request] >= packed.kv_len[0]
        if packed.trees is None:  # the host packs whatever happens to be a chain so
            assert step.kv_len[request] == packed.kv_len[0] or not is_chain
            continue
        for token in range(size):
            depth = int(packed.position_ids[token]) - 39
            path = packed.trees.paths[token, : depth + 1].tolist()
            assert step.paths[start + token, : depth + 1].tolist() == path


@settings(max_examples=60, deadline=None)
@given(rounds())
def test_moves_are_those_of_the_reference(made: Round) -> None:
    """Behind any accepted node, and never to where a later one is read."""
    generator = np.random.default_rng(made.seed)
    for level in range(made.shape.levels(made.draft_len)):
        logits = torch.from_numpy(generator.normal(size=(made.limits.max_num_rows, VOCAB))).float()
        made.run(reference, level, logits, VOCAB, False)
    made.state.max_len.copy_(made.state.committed + 50)
    for request in range(made.batch):
        count = tree_reference._num_tokens(made.state, made.trees, request, made.draft_len)
        node = int(generator.integers(0, count)) if count else 0
        made.trees.rows[request] = request * (made.draft_len + 1) + node
        depth = len(tree_reference._path_to(made.trees, request, node)) - 1
        made.state.committed[request] += (depth + 1) * bool(count)
    for tensor in (made.arrays.starts, made.arrays.moves):
        tensor.fill_(UNTOUCHED)
    found, wanted = made.copy(), made.copy()
    run_launches([kernel.list_moves(*found.described, made.draft_len)])
    reference.list_moves(*wanted.described, made.draft_len)
    for name in ("starts", "moves"):
        assert torch.equal(getattr(found.arrays, name), getattr(wanted.arrays, name)), name
    starts = found.arrays.starts.tolist()
    for request in range(made.batch):
        own = found.arrays.moves[starts[request] : starts[request + 1]].tolist()
        assert all(source != target for source, target in own)
        for nth, (_, target) in enumerate(own):
            assert target not in [source for source, _ in own[nth + 1 :]]


@pytest.mark.parametrize(("batch", "draft_len", "vocab"), [(1, 31, 128256), (64, 63, 32000)])
def test_kernels_compile_without_spills(batch: int, draft_len: int, vocab: int) -> None:
    for spec in kernel.kernels(make_limits(batch, draft_len, 4096), vocab):
        assert compile_kernel(spec).local_bytes == 0, spec.name


def test_memory_is_that_of_the_widest_trees() -> None:
    shape = TreeShape(MOST_OFFERS, MOST_WIDTH, 20)
    arrays = GrowthArrays.allocate(8, 20, shape, 5000, "cpu")
    tensors = [getattr(arrays, f.name) for f in fields(arrays) if f.name != "shape"]
    assert growth_bytes(8, 20, 5000) == sum(tensor.nbytes for tensor in tensors)
