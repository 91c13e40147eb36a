"""Query/key RMSNorm, rotary embedding ("rotate half", NeoX pairing) and the paged KV write.

The rotary factors and both products round to the model dtype before they are added, as in Hugging
Face's apply_rotary_pos_emb; in float32 nothing rounds. Checked against that function.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from llmctl.plugins.core.calls import StepInputs
from llmctl.plugins.ops.quantize.reference import quantize_int8, quantize_static
from llmctl.plugins.ops.rms_norm.reference import rms_norm


def rotate(x: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """x [N, heads, D], factors [N, D] float32 (D/2 cosines, then D/2 sines) -> rotated x."""
    cos, sin = factors.to(x.dtype)[:, None, :].chunk(2, dim=-1)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def reference(
    inputs: Mapping[str, torch.Tensor],
    outputs: Mapping[str, torch.Tensor],
    attributes: Mapping[str, int | float | str | bool],
    step: StepInputs,
    kv_cache: torch.Tensor,
) -> None:
    """Split qkv, rotate q and k, store k and v in their slots and q in `out`."""
    count, size = step.num_tokens, int(attributes["head_size"])
    num_heads, num_kv_heads = int(attributes["num_heads"]), int(attributes["num_kv_heads"])
    qkv = inputs["qkv"][:count].view(count, num_heads + 2 * num_kv_heads, size)
    q, k, v = qkv.tensor_split((num_heads, num_heads + num_kv_heads), dim=1)
    if "q_norm" in inputs:
        q = rms_norm(q, inputs["q_norm"], float(attributes["epsilon"]))
    if "k_norm" in inputs:
        k = rms_norm(k, inputs["k_norm"], float(attributes["epsilon"]))
    positions = torch.from_numpy(step.position_ids).to(qkv.device, torch.int64)
    factors = inputs["rotary"][positions]
    outputs["q"][:count] = rotate(q, factors).flatten(1)
    k = rotate(k, factors)

    cache = kv_cache[int(attributes["layer"])]  # [num_blocks, 2, kv heads, tokens_per_block, D]
    slots = torch.from_numpy(step.slot_mapping).to(qkv.device, torch.int64)
    block, offset = slots // cache.shape[3], slots % cache.shape[3]
    for index, (values, role) in enumerate(((k, "k_scale"), (v, "v_scale"))):
        if cache.dtype == torch.float8_e4m3fn:
            one = torch.ones(1, device=qkv.device)
            values = quantize_static(values, inputs.get(role, one))
            # indexed assignment is not implemented for FP8, so its bytes are assigned
            cache.view(torch.uint8)[block, index, :, offset] = values.view(torch.uint8)
        elif cache.dtype == torch.int8:
            one = torch.ones(1, device=qkv.device)
            cache[block, index, :, offset] = quantize_int8(values, inputs.get(role, one))
        else:
            cache[block, index, :, offset] = values.to(cache.dtype)
