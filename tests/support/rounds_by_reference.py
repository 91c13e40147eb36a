"""Bookkeeping of rounds by the references, for devices that call what they are to launch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from llmctl.plugins.backends.cuda.interpret import run_launches
from llmctl.plugins.device_loop import pairs_reference, reference, tree_kernel, tree_reference
from llmctl.plugins.device_loop.state import RoundState
from llmctl.plugins.ops.sampling.arrays import SamplingScratch
from llmctl.plugins.ops.tree_growth import reference as growth_reference


def bookkeeping_by_reference() -> SimpleNamespace:
    """What stands for `plugins.device_loop.kernel`: functions instead of launches, to be called."""
    names = ("draft_first", "draft_next", "verify", "accept")
    found = {name: partial(partial, getattr(reference, name)) for name in names}

    def draw_next(logits: torch.Tensor, scratch: SamplingScratch, *rest: Any) -> partial[None]:
        return partial(reference.draw_next, logits, *rest)

    return SimpleNamespace(**found, draw_next=draw_next)


def trees_by_reference() -> SimpleNamespace:
    """The same for `plugins.device_loop.tree_kernel`."""
    names = ("verify_tree", "accept_tree", "spread")
    found = {name: partial(partial, getattr(tree_reference, name)) for name in names}
    listed: list[torch.Tensor] = []

    def list_top(
        logits: tree_kernel.HeadLogits, keys: torch.Tensor, batch: int, count: int
    ) -> Callable[[], None]:
        def note() -> None:
            listed[:] = logits.tensors

        return note

    def fill_tree(
        keys: torch.Tensor,
        nodes: tree_kernel.StaticNodes,
        state: RoundState,
        batch: int,
        draft_len: int,
        *sizes: int,
    ) -> Callable[[], None]:
        def fill() -> None:
            if not listed:  # ranks listed them together: the kernel reads that
                run_launches([tree_kernel.fill_tree(keys, nodes, state, batch, draft_len, *sizes)])
                return
            tree_reference.fill_tree(listed, nodes.heads, nodes.ranks, state, batch, draft_len)
            listed.clear()

        return fill

    return SimpleNamespace(
        **found,
        list_top=list_top,
        fill_tree=fill_tree,
        num_keys=tree_kernel.num_keys,
        num_chunks=tree_kernel.num_chunks,
        StaticNodes=tree_kernel.StaticNodes,
        HeadLogits=tree_kernel.HeadLogits,
    )


def growth_by_reference() -> SimpleNamespace:
    """The same for `plugins.ops.tree_growth.kernel`."""
    names = ("grow", "list_moves")
    found = {name: partial(partial, getattr(growth_reference, name)) for name in names}

    def offer(*given: Any, **options: Any) -> list[partial[None]]:
        return [partial(growth_reference.offer, *given, **options)]

    return SimpleNamespace(**found, offer=offer)


def run_rounds_by_reference(monkeypatch: Any) -> None:
    """Bookkeeping of rounds from now on by the references, for programs that call what they are
    to launch."""
    chains, trees = bookkeeping_by_reference(), trees_by_reference()
    runtime = "llmctl.runtime"
    drafting = ("draft_engine.device", "draft_engine.device_trees", "eagle.device")
    for place in ("rounds.verification", *(f"drafting.{name}" for name in drafting)):
        monkeypatch.setattr(f"{runtime}.{place}.bookkeeping", chains)
    monkeypatch.setattr(f"{runtime}.drafting.growth.device.kernel", growth_by_reference())
    pairs = SimpleNamespace(
        read_pairs=partial(partial, pairs_reference.read_pairs),
        read_path=partial(partial, pairs_reference.read_path),
    )
    for place in ("device", "device_trees"):
        monkeypatch.setattr(f"{runtime}.drafting.eagle.{place}.pairs_kernel", pairs)
    for place in ("rounds.verification", "rounds.device_steps", "drafting.medusa.device"):
        monkeypatch.setattr(f"{runtime}.{place}.tree_kernel", trees)
