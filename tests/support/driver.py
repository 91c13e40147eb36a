"""A CUDA driver without a GPU: it keeps the launches that programs prepare and enqueue."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any


@dataclass(frozen=True)
class Prepared:
    """A launch as it was asked for; calling it counts it as enqueued."""

    kernel: Any  # what was loaded, or what stands in for it
    grid: Sequence[int]
    arguments: tuple[object, ...]
    use_pdl: bool
    enqueued: list[Prepared]

    def __call__(self, stream: int) -> None:
        self.enqueued.append(self)


class RecordingDriver:
    """What a program asks of the driver."""

    def __init__(self) -> None:
        self.prepared: list[Prepared] = []
        self.enqueued: list[Prepared] = []
        self.num_rebound = 0

    def make_current(self) -> None: ...

    def load(self, kernel: Any) -> Any:
        return kernel

    def prepare(
        self, kernel: Any, grid: Sequence[int], arguments: Sequence[object], use_pdl: bool
    ) -> Prepared:
        return self._keep(Prepared(kernel, grid, tuple(arguments), use_pdl, self.enqueued))

    def rebind(self, launch: Prepared, tensors: Mapping[int, object]) -> Prepared:
        arguments = tuple(tensors.get(at, kept) for at, kept in enumerate(launch.arguments))
        self.num_rebound += 1
        return self._keep(replace(launch, arguments=arguments))

    def copy_to_device(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        ctypes.memmove(target, source, num_bytes)

    def make_event(self) -> SimpleNamespace:
        return SimpleNamespace(record=lambda stream: None, wait=lambda: None)

    def _keep(self, launch: Prepared) -> Prepared:
        self.prepared.append(launch)
        return launch
