"""Lookahead decoding in device rounds: windows and pools stay on the device."""

from __future__ import annotations

from collections.abc import Sequence as Items

import torch

from llmctl.plugins.backends.cuda.queue import device_errors
from llmctl.plugins.device_loop.trees import DraftTrees
from llmctl.plugins.ops.lookahead import kernel
from llmctl.plugins.ops.lookahead.arrays import LookaheadArrays, LookaheadSizes
from llmctl.runtime.drafting.drafter import NeverReads, OnRank0
from llmctl.runtime.drafting.lookahead.drafter import LookaheadDrafter
from llmctl.runtime.drafting.lookahead.upload import write_state, write_texts
from llmctl.runtime.engines.cuda_engine import CudaEngine
from llmctl.runtime.request import Sequence
from llmctl.runtime.rounds.device_steps import DeviceSteps, RoundShape


class DeviceLookahead(NeverReads, OnRank0):
    """See DeviceDrafter. A sequence has a slot from its first round on, filled from the host's
    window and pool. Those of the host learn from its own steps alone, and those of the device from
    rounds alone: each goes on from wherever the text is by then.

    sizes: those that the engine's kernels are for; the drafter's are no larger.
    """

    engines = ()
    max_requests: int | None = None
    falls_behind = False

    def __init__(
        self, target: CudaEngine, sizes: LookaheadSizes, draft_len: int, drafter: LookaheadDrafter
    ) -> None:
        self.draft_len = min(draft_len, drafter.max_draft_len)
        self._target, self._sizes, self._drafter = target, sizes, drafter
        window, ngram = drafter.config.window_size, drafter.config.ngram_size
        self._depth = max(window + ngram - 3, ngram - 1)
        self._slots: dict[int, int] = {}  # by sequence id, the latest used last

    def make_trees(
        self, max_batch_size: int, max_draft_len: int, device: torch.device | str
    ) -> DraftTrees:
        """Trees that every round makes anew."""
        return DraftTrees.allocate(max_batch_size, max_draft_len, device)

    def bind(self, steps: DeviceSteps) -> None:
        """See DeviceDrafter, as for all that follow."""
        self._steps, state = steps, steps.state
        self._arrays = LookaheadArrays.allocate(
            self._sizes, state.max_batch_size, state.max_draft_len, self._target.queue.device
        )

    def prepare(self) -> None:
        """Nothing is read in advance."""

    def branches(self, draft_len: int) -> bool:
        return draft_len > 1

    def depth(self, draft_len: int) -> int:
        return min(draft_len, self._depth)

    def can_draft(self, sequence: Sequence) -> bool:
        return self._drafter.config_of(sequence).max_draft_len > 0

    def begin(self, sequences: Items[Sequence]) -> None:
        queue = self._target.queue
        fresh = self._take_slots(sequences)
        slots = [self._slots[sequence.sequence_id] for sequence in sequences]
        configs = [self._drafter.config_of(sequence) for sequence in sequences]
        with device_errors("writing windows of lookahead decoding"), queue.scope():
            for sequence in fresh:
                state = self._drafter.state_of(sequence)
                state.follow(sequence.tokens)
                slot, end_id = self._slots[sequence.sequence_id], sequence.request.end_id
                write_state(self._arrays, slot, state, end_id, queue)
            write_texts(self._arrays, sequences, configs, slots, queue)

    def end(self, nodes: Items[int], draft_len: int) -> None:
        """Acceptance on the device says all that the next round reads."""

    def is_behind(self, sequence: Sequence) -> bool:
        return False

    def catch_up(self, sequences: Items[Sequence]) -> None:
        """There is no cache."""

    def enqueue_drafts(self, shape: RoundShape) -> None:
        state, trees = self._steps.state, self._steps.trees
        assert trees is not None, "of `make_trees`"
        sizes = shape.batch, shape.draft_len
        self._steps.launch(self._target, [kernel.look_ahead(state, trees, self._arrays, *sizes)])

    def note(self, sequence: Sequence, committed: int, accepted: int, draft_len: int) -> None:
        """There is no cache."""

    def _take_slots(self, sequences: Items[Sequence]) -> list[Sequence]:
        """Give every sequence a slot; those that had none. Slots of sequences that have ended are
        free, then that of the sequence that has not run for longest."""
        known = {owner: slot for owner, slot in self._slots.items() if owner in self._drafter}
        wanted = {sequence.sequence_id for sequence in sequences}
        others = [owner for owner in known if owner not in wanted]
        taken = set(known.values())
        free = [slot for slot in range(len(self._arrays.slots)) if slot not in taken]
        fresh = []
        for sequence in sequences:
            slot = known.pop(sequence.sequence_id, None)
            if slot is None:
                fresh.append(sequence)
                slot = free.pop() if free else known.pop(others.pop(0))
            known[sequence.sequence_id] = slot
        self._slots = known
        return fresh
