"""tree.cu thread by thread on a CPU (support/emulated_warps.py): trees and chains have the bits of
decoding each token alone by verification.cu."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from support import emulated_warps
from support.attention import FP8, World
from support.trees import differing_chosen, differing_tokens, random_parents

from llmctl.plugins.backends.cuda.kernel_spec import Launch, LaunchEnv
from llmctl.plugins.core.calls import StepInputs
from llmctl.plugins.ops.paged_attention import ways
from llmctl.plugins.ops.paged_attention.tree import tree
from llmctl.plugins.ops.paged_attention.verification.verification import Variant


class Compiled(World):
    """Whose steps take the kernels of a GPU."""

    def env(self, step: StepInputs, padding: int = 0) -> LaunchEnv:
        return replace(super().env(step, padding), use_pdl=True)


class Runs:
    """Executes launches in ever other orders of threads, with copies done early and late."""

    def __init__(self) -> None:
        self.entries: list[str] = []

    def __call__(self, launches: Sequence[Launch]) -> None:
        for launch in launches:
            self.entries.append(launch.spec.entry)
            turn = len(self.entries)
            emulated_warps.run([launch], turn, is_late=turn % 2 == 0)


def world_of(group: int, length: int, parents: Sequence[int] = (), per_page: int = 32) -> Compiled:
    return Compiled(
        tokens_per_block=per_page,
        heads=group,
        kv_heads=1,
        size=128,
        kv_dtype=FP8,
        quantize_out=True,
        lengths=(length, 60, 90),
        spread=2.0,
        trees={0: parents} if parents else {},
    )


@pytest.fixture(autouse=True)
def tree_for_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Single tokens run by verification.cu, chains and trees by tree.cu."""
    alone = Variant(4, 4, 8)
    monkeypatch.setattr(ways, "choose_cut", lambda *step: None)
    monkeypatch.setattr(ways, "choose_variant", lambda *step: alone)
    monkeypatch.setattr(tree, "choose_tree_variant", lambda *step: None)
    monkeypatch.setattr(tree, "estimate_us", lambda *step: 0.1)


@pytest.mark.parametrize(
    ("group", "root", "drafts", "parts", "per_page"),
    [(4, 20, 20, 2, 32), (4, 63, 6, 2, 32), (8, 130, 9, 2, 32), (2, 200, 40, 2, 32)]
    + [(8, 1023, 12, 2, 32), (4, 1100, 20, 2, 32), (8, 1166, 6, 2, 32), (1, 300, 8, 2, 32)]
    + [(4, 1300, 6, 2, 32), (4, 2150, 5, 2, 32), (4, 330, 9, 2, 8), (4, 330, 9, 2, 128)]
    + [(4, 20, 20, 1, 32), (8, 1166, 6, 1, 32), (2, 330, 40, 1, 16)],
)
def test_trees_have_the_bits_of_decoding_their_paths(
    monkeypatch, group, root, drafts, parts, per_page
):
    """In contexts of none, one, sixteen and more work items, of one tile, two and four; roots at
    the borders of tiles and of work items, or within a work item that begins before; by one thread
    block or two to the same rows."""
    monkeypatch.setattr(tree, "count_parts", lambda *step: parts)
    execute, decoded = Runs(), {}
    world = world_of(group, root + drafts + 20, random_parents(drafts, root), per_page)
    assert not differing_tokens(world, root, execute, decoded=decoded, padding=(0, 0))
    assert not differing_chosen(world, root, [2, 4, 5], execute, decoded)
    assert set(execute.entries) == {"tree", "verification"}
