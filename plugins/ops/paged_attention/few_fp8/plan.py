"""Room for what thread blocks have of a step, which its layers find once (plan.cuh)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from llmctl.plugins.backends.cuda.kernel_spec import LaunchEnv

_LANES = 32


def plan_room(
    env: LaunchEnv, name: str, blocks: int, kinds: int = 1, kind: int = 0
) -> tuple[torch.Tensor, int]:
    """Room for a kernel's thread blocks, 8 bytes a number, and how many numbers one has: enough for
    all requests of an engine's step.

    kinds: of kernels under one name, of which this is one. They differ in what a thread block has,
    so each has its own room.
    """
    requests = -(-env.limits.max_batch_size // _LANES) * _LANES
    size = 1 + 2 * _LANES + 3 * requests
    room = env.scratch(f"{name}.plans", (kinds, -(-blocks * size // 2) * 2), torch.int64)
    return room[kind], size
