"""What random calls are made of: tensors, steps, and caches filled with what came before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from llmctl.plugins.core.calls import OpCall, StepInputs
from llmctl.plugins.core.op_spec import INT8_MAX, Case

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Example:
    """One call with its step and cache."""

    call: OpCall
    step: StepInputs
    kv_cache: torch.Tensor

    def clone(self) -> Example:
        """The same example in fresh memory."""
        copies: dict[int, torch.Tensor] = {}

        def copy(tensors: Mapping[str, torch.Tensor]) -> Tensors:
            return {k: copies.setdefault(id(t), t.clone()) for k, t in tensors.items()}

        call = self.call
        fresh = OpCall(
            call.op, call.name, copy(call.inputs), copy(call.outputs), dict(call.attributes)
        )
        return Example(fresh, self.step, self.kv_cache.clone())


def make_step(
    requests: list[tuple[int, int]], tokens_per_block: int = 32, seed: int = 0, vocab: int = 1000
) -> tuple[StepInputs, int]:
    """A step for (new tokens, tokens cached before) per request; also returns num_blocks.

    Blocks are dealt in random order, and the cache has three blocks that no request uses.
    """
    random = np.random.default_rng(seed)
    kv_len = np.array([new + old for new, old in requests], np.int32)
    needed = [-(-int(n) // tokens_per_block) for n in kv_len]
    num_blocks = sum(needed) + 3
    free = random.permutation(num_blocks).astype(np.int32)
    tables = np.full((len(requests), max(needed)), -1, np.int32)
    positions, slots = [], []
    for row, (new, old) in enumerate(requests):
        blocks, free = free[: needed[row]], free[needed[row] :]
        tables[row, : needed[row]] = blocks
        where = np.arange(old, old + new, dtype=np.int32)
        positions.append(where)
        slots.append(
            blocks[where // tokens_per_block] * tokens_per_block + where % tokens_per_block
        )
    cu_q = np.cumsum([0, *(new for new, _ in requests)]).astype(np.int32)
    step = StepInputs(
        token_ids=random.integers(0, vocab, int(cu_q[-1])).astype(np.int32),
        position_ids=np.concatenate(positions),
        cu_q=cu_q,
        kv_len=kv_len,
        block_tables=tables,
        slot_mapping=np.concatenate(slots).astype(np.int32),
        logit_rows=(cu_q[1:] - 1).astype(np.int32),
    )
    return step, num_blocks


def parse_requests(text: str) -> list[tuple[int, int]]:
    """ "5+31 1+0" -> [(5, 31), (1, 0)]: new tokens + tokens cached before."""
    pairs = (part.split("+") for part in text.split())
    return [(int(new), int(old)) for new, old in pairs]


def random_tensor(
    shape: tuple[int, ...], dtype: str, generator: torch.Generator, spread: float = 1.0
) -> torch.Tensor:
    """Normal values of the given spread, rounded to dtype."""
    return (torch.randn(shape, generator=generator) * spread).to(getattr(torch, dtype))


def empty(shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    """Noise that must be replaced."""
    kind: torch.dtype = getattr(torch, dtype)
    size = torch.empty(0, dtype=kind).element_size()
    return torch.full((*shape, size), 0x55, dtype=torch.uint8).view(kind).squeeze(-1)


def plain_step(tokens: int, vocab: int = 1000) -> StepInputs:
    """One prompt."""
    return make_step([(tokens, 0)], vocab=vocab)[0]


def no_cache() -> torch.Tensor:
    """For calls that read and write none."""
    return torch.zeros((1, 1, 2, 1, 32, 16))


def head_attributes(case: Case) -> dict[str, int | float | str | bool]:
    """Attributes of a call with attention heads."""
    names = ("num_heads", "num_kv_heads", "head_size")
    return {"layer": 1, **{name: case[name] for name in names}}


def filled_cache(case: Case, num_blocks: int, generator: torch.Generator) -> torch.Tensor:
    """A paged cache of two layers that holds what "was computed before"."""
    heads, size = int(case["num_kv_heads"]), int(case["head_size"])
    shape = (2, num_blocks, 2, heads, int(case.get("tokens_per_block", 32)), size)
    if case["kv_dtype"] == "int8":
        wide = random_tensor(shape, "float32", generator, 40)
        return wide.round().clamp(-INT8_MAX, INT8_MAX).to(torch.int8)
    return random_tensor(shape, str(case["kv_dtype"]), generator)


def kv_scales(case: Case) -> Tensors:
    """Of a quantized cache; none for others."""
    scales = {"float8_e4m3fn": (0.75, 1.25), "int8": (0.021, 0.034)}.get(str(case["kv_dtype"]))
    if scales is None:
        return {}
    return {role: torch.tensor([s]) for role, s in zip(("k_scale", "v_scale"), scales, strict=True)}
