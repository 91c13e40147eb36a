"""Splits a step over slots of a contiguous cache into runs of a plan whose batch is adjacent
slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmctl.plugins.backends.tensorrt.execution import ADDRESS_ALIGNMENT
from llmctl.plugins.core.calls import StepInputs

_WORDS = ADDRESS_ALIGNMENT // 4  # int32 between the arrays of a step


@dataclass(frozen=True, slots=True)
class Group:
    """Requests of neighbouring slots, run together. Each reads `length` tokens and gets the logits
    of `rows`, indices among them; one row that nobody wants where none is asked for."""

    first_slot: int
    requests: tuple[int, ...]  # indices into the step, in slot order
    length: int
    rows: tuple[int, ...]
    wanted: tuple[int, ...]  # rows of the step's logits, in the group's order; () if none is

    @property
    def sizes(self) -> dict[str, int]:
        """The dimensions of the plan's bindings."""
        batch, rows = len(self.requests), len(self.rows)
        return {"batch": batch, "length": self.length, "rows": rows, "drafts": rows - 1}

    def is_whole(self, num_rows: int) -> bool:
        """Whether its logits are the step's `num_rows` as they are."""
        return self.wanted == tuple(range(num_rows))


def group_requests(step: StepInputs) -> list[Group]:
    """The step as runs of the plan, in slot order."""
    described = []
    for request in range(step.num_requests):
        start, stop = int(step.cu_q[request]), int(step.cu_q[request + 1])
        wanted = np.flatnonzero((step.logit_rows >= start) & (step.logit_rows < stop))
        rows = tuple((step.logit_rows[wanted] - start).tolist()) or (stop - start - 1,)
        slot = int(step.block_tables[request, 0])
        described.append(Group(slot, (request,), stop - start, rows, tuple(wanted.tolist())))
    groups: list[Group] = []
    for found in sorted(described, key=lambda group: group.first_slot):
        if groups and _can_join(groups[-1], found):
            last = groups.pop()
            requests, wanted_rows = (*last.requests, *found.requests), (*last.wanted, *found.wanted)
            found = Group(last.first_slot, requests, last.length, last.rows, wanted_rows)
        groups.append(found)
    return groups


def _can_join(group: Group, other: Group) -> bool:
    is_chunk = group.length > 1 and len(group.rows) == 1
    alike = (group.length, group.rows) == (other.length, other.rows)
    neighbours = group.first_slot + len(group.requests) == other.first_slot
    return alike and neighbours and not is_chunk and bool(group.wanted) == bool(other.wanted)


def step_arrays(step: StepInputs, group: Group) -> dict[str, NDArray[np.int32]]:
    """What the plan is fed for one group, by binding."""
    tokens = np.concatenate(
        [np.arange(step.cu_q[request], step.cu_q[request + 1]) for request in group.requests]
    ).reshape(-1, group.length)
    ids, positions = step.token_ids[tokens], step.position_ids[tokens]
    batch = np.arange(len(group.requests), dtype=np.int32)
    return {
        "token_ids": ids,
        "position_ids": positions,
        "write_index": positions[:, 0].copy(),
        "kv_length": positions[:, 0] + np.int32(group.length),
        "logit_rows": batch[:, None] * np.int32(group.length) + np.array(group.rows, np.int32),
        # Nothing: tokens are chosen by the executor, which also samples, bans and penalizes.
        "drafts": np.full((len(batch), len(group.rows) - 1), -1, np.int32),
    }


def pack_arrays(
    fed: Sequence[dict[str, NDArray[np.int32]]],
) -> tuple[NDArray[np.int32], list[dict[str, int]]]:
    """(all arrays in one, each on an aligned address; where each begins, by group and name)."""
    starts: list[dict[str, int]] = []
    size = 0
    for arrays in fed:
        starts.append({})
        for name, array in arrays.items():
            starts[-1][name] = size
            size += max(1, -(-array.size // _WORDS)) * _WORDS
    packed = np.zeros(size, np.int32)
    for arrays, begin in zip(fed, starts, strict=True):
        for name, array in arrays.items():
            packed[begin[name] : begin[name] + array.size] = array.reshape(-1)
    return packed, starts


def packed_words(num_tokens: int, num_arrays: int = 6) -> int:
    """The most int32 that the arrays of one group of so many tokens take."""
    return num_arrays * max(1, -(-num_tokens // _WORDS)) * _WORDS
