"""Query, key and value projections, then rotary embedding and KV write: references composed.

The products round to the model dtype first, as they do when the operators are apart.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from llmctl.plugins.core.calls import StepInputs
from llmctl.plugins.ops.packed_linear.layout import rope_order
from llmctl.plugins.ops.packed_linear.reference import normalized, product
from llmctl.plugins.ops.rope_kv_write.reference import reference as rope_kv_write


def reference(
    inputs: Mapping[str, torch.Tensor],
    outputs: Mapping[str, torch.Tensor],
    attributes: Mapping[str, int | float | str | bool],
    step: StepInputs,
    kv_cache: torch.Tensor,
) -> None:
    """Multiply all rows of `x`, normalized if there is a norm, rotate q and k, store k and v in
    their slots and q in `q`.
    """
    inputs = normalized(inputs, outputs, attributes)
    order = rope_order(
        *(int(attributes[name]) for name in ("num_heads", "num_kv_heads", "head_size"))
    )
    rest = {role: inputs[role] for role in ("rotary", "k_scale", "v_scale") if role in inputs}
    qkv = product(inputs, attributes, order, outputs["q"].dtype)
    rope_kv_write({"qkv": qkv, **rest}, outputs, attributes, step, kv_cache)
