"""Calls that launch alike: those of a model's layers differ only in their own tensors.

Their launches are described and packed for one of them, and the others use copies with different
pointers (`Driver.rebind`). An operator's `kernel.py` whose launches can be rebound says so with
`OWN_ROLES`: the roles whose tensors belong to one layer. Then nothing else in its launches may
depend on the call, except the layer's part of the cache, through the attribute `layer`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from llmctl.plugins.backends.cuda.kernel_spec import Launch, LaunchEnv
    from llmctl.plugins.core.calls import Extent, OpCall

Prepared = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Packed:
    """The launches of one call, ready to enqueue."""

    prepared: list[Prepared]
    launches: list[Launch]  # the descriptions, which own tensors; the model's where it was rebound

    def enqueue(self, stream: int) -> None:
        for launch in self.prepared:
            launch(stream)


@dataclass(frozen=True, slots=True)
class Model:
    """The launches of a call, as a template for similar calls. packed_for: tokens, rows or a
    shape."""

    packed_for: Hashable
    packed: Packed
    places: list[dict[int, int]] | None  # of each launch: which argument is which own tensor


def look(call: OpCall, extent: Extent, module: Any) -> Hashable:
    """Equal for calls that launch alike. None: the operator's launches cannot be rebound."""
    own = getattr(module, "OWN_ROLES", None)
    if own is None:
        return None
    tensors = {**call.inputs, **call.outputs}.items()
    found = [_place(tensor) for role, tensor in tensors if role in own]
    return (
        *(call.op, call.tactic, extent),
        tuple((role, x.dtype, x.shape, role in own or _place(x)) for role, x in tensors),
        tuple(found.index(place) for place in found),  # which of its own are the same tensor
        tuple(item for item in call.attributes.items() if item[0] != "layer"),
    )


def own_tensors(call: OpCall, env: LaunchEnv, module: Any) -> list[torch.Tensor]:
    """A call's own tensors, in an order that similar calls share."""
    tensors = {**call.inputs, **call.outputs}
    own = [tensor for role, tensor in tensors.items() if role in module.OWN_ROLES]
    layer = call.attributes.get("layer")
    return own if layer is None else [*own, env.kv_cache[int(layer)]]


def model_of(packed_for: Hashable, packed: Packed, own: Sequence[torch.Tensor]) -> Model:
    """The template for a call with these own tensors. It is not used for other calls if one of them
    is not itself an argument, because then other arguments may depend on it."""
    numbers = {_place(tensor): number for number, tensor in reversed(list(enumerate(own)))}
    places = [
        {
            at: numbers[_place(argument)]
            for at, argument in enumerate(launch.arguments)
            if isinstance(argument, torch.Tensor) and _place(argument) in numbers
        }
        for launch in packed.launches
    ]
    found = {number for each in places for number in each.values()}
    return Model(packed_for, packed, places if found == set(numbers.values()) else None)


def _place(tensor: torch.Tensor) -> tuple[int, int]:
    """Where a tensor begins, also one without memory."""
    offset = int(tensor.storage_offset()) * tensor.element_size()
    return tensor.untyped_storage()._cdata, offset
