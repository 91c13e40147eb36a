"""A small model as CPU calls."""

from __future__ import annotations

import numpy as np
import torch

from llmctl.plugins.core.calls import OpCall, StepInputs
from llmctl.plugins.core.example_parts import make_step, random_tensor
from llmctl.plugins.core.op_spec import FP8

VOCAB, HIDDEN, INNER, HEADS, KV_HEADS, SIZE, TOKENS = 131, 48, 80, 3, 1, 16, 96


SHAPE = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_size": SIZE}


class TinyModel:
    """Two Llama layers with random weights, as calls into buffers that are reused in turn."""

    def __init__(self, quantized: bool) -> None:
        self.generator = torch.Generator().manual_seed(3)
        self.quantized = quantized
        self.activation = FP8 if quantized else "bfloat16"
        self.calls: list[OpCall] = []
        residual = self.add("embedding", {"weight": self.random(VOCAB, HIDDEN)}, HIDDEN)
        x = residual
        for layer in range(2):
            x = self.norm(x, residual if layer else None)
            x = self.attention(layer, x)
            x = self.norm(x, residual)
            scales = {"scale": torch.tensor([0.01])} if quantized else {}
            up = self.linear(x, 2 * INNER)
            x = self.add("swiglu", {"x": up, **scales}, INNER, self.activation)
            x = self.linear(x, HIDDEN)
        x = self.add("gather_rows", {"x": x}, HIDDEN)
        residual = self.add("gather_rows", {"x": residual}, HIDDEN)
        x = self.norm(x, residual, quantized=False)
        head = {"x": x, "weight": self.random(VOCAB, HIDDEN)}
        self.logits = self.add("linear", head, VOCAB, "float32")
        kv_dtype = FP8 if quantized else "bfloat16"
        self.kv_cache = torch.zeros((2, 40, 2, KV_HEADS, 32, SIZE)).to(getattr(torch, kv_dtype))

    def random(self, *shape: int) -> torch.Tensor:
        return random_tensor(shape, "bfloat16", self.generator, shape[-1] ** -0.5)

    def add(
        self,
        op: str,
        inputs: dict[str, torch.Tensor],
        width: int,
        dtype: str = "bfloat16",
        role: str = "out",
        **attributes: float,
    ) -> torch.Tensor:
        out = torch.zeros((TOKENS, width)).to(getattr(torch, dtype))
        self.calls.append(OpCall(op, f"{op}.{len(self.calls)}", inputs, {role: out}, attributes))
        return out

    def linear(self, x: torch.Tensor, width: int) -> torch.Tensor:
        weight = self.random(width, x.shape[1])
        if not self.quantized:
            return self.add("linear", {"x": x, "weight": weight}, width)
        scale = weight.float().abs().amax(1) / 448
        weight = (weight.float() / scale[:, None]).to(torch.float8_e4m3fn)
        scales = {"weight_scale": scale, "x_scale": torch.tensor([0.01])}
        return self.add("linear", {"x": x, "weight": weight, **scales}, width)

    def norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, quantized: bool | None = None
    ) -> torch.Tensor:
        quantized = self.quantized if quantized is None else quantized
        inputs = {"x": x, "weight": self.random(HIDDEN) + 1}
        out = torch.zeros((TOKENS, HIDDEN)).to(getattr(torch, FP8 if quantized else "bfloat16"))
        outputs = {"out": out}
        if residual is not None:
            inputs["residual"] = outputs["residual_out"] = residual
        if quantized:
            inputs["scale"] = torch.tensor([0.01])
        self.calls.append(
            OpCall("rms_norm", f"norm.{len(self.calls)}", inputs, outputs, {"epsilon": 1e-5})
        )
        return out

    def attention(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        qkv = self.linear(x, (HEADS + 2 * KV_HEADS) * SIZE)
        angles = torch.rand((512, SIZE // 2), generator=self.generator) * 6.28
        rotary = torch.cat((angles.cos(), angles.sin()), dim=-1)
        scales = {"k_scale": torch.tensor([0.01]), "v_scale": torch.tensor([0.01])}
        scales = scales if self.quantized else {}
        inputs = {"qkv": qkv, "rotary": rotary, **scales}
        where = {"layer": layer, **SHAPE}
        width = HEADS * SIZE
        q = self.add("rope_kv_write", inputs, width, role="q", **where, epsilon=1e-5)
        inputs = {"q": q, **scales}
        if self.quantized:
            inputs["out_scale"] = torch.tensor([0.01])
        attributes = {**where, "softmax_scale": 0.25, "window": 0}
        out = self.add("paged_attention", inputs, width, self.activation, **attributes)
        return self.linear(out, HIDDEN)


def chunk_step(prompts: list[np.ndarray], parts: list[tuple[int, int, int]]) -> StepInputs:
    """A step of (request, start, stop) parts; request r owns blocks 4r to 4r + 3."""
    step, _ = make_step([(stop - start, start) for _, start, stop in parts])
    tables = [np.arange(4 * r, 4 * r + 4) for r, _, _ in parts]
    step.block_tables = np.array(tables, np.int32)
    ids = [prompts[r][start:stop] for r, start, stop in parts]
    step.token_ids = np.concatenate(ids).astype(np.int32)
    slots = [r * 128 + np.arange(start, stop) for r, start, stop in parts]
    step.slot_mapping = np.concatenate(slots).astype(np.int32)
    return step
