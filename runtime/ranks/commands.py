"""What rank 0 asks of an engine, as bytes: a call, for every rank to make.

A command is two numbers of 4 bytes (of the JSON head, of everything after), the head, then the
int32 arrays of a step one after another.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmctl.plugins.core.calls import StepInputs, Trees
from llmctl.runtime.kv_cache import BlockCopy, CopyKind, Move

_SIZES = struct.Struct("<II")
_STEP = (
    "token_ids",
    "position_ids",
    "cu_q",
    "kv_len",
    "block_tables",
    "slot_mapping",
    "logit_rows",
)


_STEPS = ("run", "feed")  # calls with a step
_HEADS = ("run_head", "hand_on")  # calls with several arguments, those of a head
ROUNDS = "rounds"  # in the place of an engine's role: what runs rounds on a device


@dataclass(frozen=True, slots=True)
class Command:
    """One call of one engine. `argument` is a number, copies, moves, a step, for rounds what JSON
    has, and for a head a tuple: its name and a step, or where to take from and how many rows."""

    engine: str  # its role, or ROUNDS
    call: str  # of Engine, or of what runs rounds (following.py)
    argument: Any = None

    def make(self, engines: Mapping[str, Any]) -> None:
        """Make the call, on engines by role."""
        call = getattr(engines[self.engine], self.call)
        if self.call in _HEADS:
            call(*self.argument)
        else:
            call(self.argument)


def encode(command: Command) -> bytes:
    """The bytes of a command."""
    argument = command.argument
    arrays: list[NDArray[np.int32]] = []
    if command.call in _STEPS:
        arrays, argument = _describe(argument)
    elif command.call == "run_head":
        name, step = argument
        arrays, described = _describe(step)
        argument = [name, described]
    elif command.call == "copy_blocks":
        argument = [(*copy[:3], copy.kind.value, copy.groups) for copy in argument]
    head = json.dumps([command.engine, command.call, argument], default=int).encode()
    data = b"".join(np.ascontiguousarray(array, np.int32).tobytes() for array in arrays)
    return _SIZES.pack(len(head), len(data)) + head + data


def decode(read: Callable[[int], bytes]) -> Command:
    """The next command, from read(number of bytes)."""
    num_head, num_data = _SIZES.unpack(read(_SIZES.size))
    engine, call, argument = json.loads(read(num_head))
    if call in _STEPS:
        argument = _step(argument, read(num_data))
    elif call == "run_head":
        name, described = argument
        argument = (name, _step(described, read(num_data)))
    elif call == "copy_blocks":
        argument = [
            BlockCopy(src, dst, count, CopyKind(kind), groups)
            for src, dst, count, kind, groups in argument
        ]
    elif call == "compact":
        argument = _moves(argument)
    return Command(engine, call, argument)


def _describe(step: StepInputs) -> tuple[list[NDArray[np.int32]], list[Any]]:
    """(all arrays of a step, those that it may lack behind the others; what JSON has of it)."""
    arrays = [getattr(step, name) for name in _STEP]
    if step.trees is not None:
        arrays += [step.trees.start, step.trees.paths]
        arrays += [] if step.trees.roots is None else [step.trees.roots]
    ends = step.context_end
    arrays += [] if ends is None else [ends]
    return arrays, [[array.shape for array in arrays], step.best_only, ends is not None]


def _step(described: Sequence[Any], data: bytes) -> StepInputs:
    """The inverse."""
    shapes, best_only, has_ends = described
    arrays: list[NDArray[np.int32]] = []
    first = 0
    for shape in shapes:
        count = int(np.prod(shape))
        part = data[first : first + 4 * count]
        arrays.append(
            np.frombuffer(part, np.int32).reshape(shape) if count else np.zeros(shape, np.int32)
        )
        first += 4 * count
    ends = arrays.pop() if has_ends else None
    count = len(_STEP)
    trees = Trees(*arrays[count:]) if len(arrays) > count else None
    own: dict[str, Any] = dict(zip(_STEP, arrays[:count], strict=True))
    return StepInputs(**own, trees=trees, context_end=ends, best_only=best_only)


def _moves(argument: Sequence[Sequence[Sequence[int]]]) -> list[list[Move]]:
    return [[(source, target) for source, target in own] for own in argument]
