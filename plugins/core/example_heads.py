"""Random calls of the operators that only draft heads have. See examples.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch

from llmctl.plugins.core.calls import OpCall
from llmctl.plugins.core.example_parts import Example, empty, no_cache, plain_step, random_tensor
from llmctl.plugins.core.op_spec import Case


def _recurrence(case: Case, generator: torch.Generator) -> Example:
    tokens, rows, width = (int(case[k]) for k in ("tokens", "rows", "hidden"))
    dtype = str(case["dtype"])
    step = plain_step(tokens)
    step.logit_rows = np.random.default_rng(0).integers(0, rows, tokens).astype(np.int32)
    inputs = {
        "x": random_tensor((tokens, width), dtype, generator),
    }
    outputs = {"state": empty((tokens, width), dtype)}
    if case["context"]:
        inputs["context"] = random_tensor((rows, 2 * width), dtype, generator)
        outputs["out"] = empty((tokens, 2 * width), dtype)
    if case["carry"]:
        inputs["carry"] = random_tensor((rows, width), dtype, generator)
    call = OpCall("recurrence", "recurrence", inputs, outputs, {"silu": bool(case["silu"])})
    return Example(call, step, no_cache())


def _concat(case: Case, generator: torch.Generator) -> Example:
    tokens, width, other = (int(case[k]) for k in ("tokens", "hidden", "other"))
    dtype = str(case["dtype"])
    inputs = {
        "x": random_tensor((tokens, width), dtype, generator),
        "y": random_tensor((tokens, other), dtype, generator),
    }
    outputs = {"out": empty((tokens, width + other), dtype)}
    return Example(OpCall("concat", "concat", inputs, outputs, {}), plain_step(tokens), no_cache())


def _add(case: Case, generator: torch.Generator) -> Example:
    shape, dtype = (int(case["tokens"]), int(case["hidden"])), str(case["dtype"])
    inputs = {role: random_tensor(shape, dtype, generator) for role in ("x", "residual")}
    call = OpCall("add", "add", inputs, {"out": empty(shape, dtype)}, {})
    return Example(call, plain_step(shape[0]), no_cache())


def _expand_logits(case: Case, generator: torch.Generator) -> Example:
    """A tenth of the indices are no columns."""
    tokens, reduced, vocab = (int(case[k]) for k in ("tokens", "reduced", "vocab"))
    index = torch.randint(0, reduced, (vocab,), generator=generator, dtype=torch.int32)
    index[::10] = -1
    index[5::10] = reduced
    inputs = {"x": random_tensor((tokens, reduced), "float32", generator), "index": index}
    outputs = {"out": empty((tokens, vocab), "float32")}
    call = OpCall("expand_logits", "expand", inputs, outputs, {})
    return Example(call, plain_step(tokens), no_cache())


HEAD_MAKERS: Mapping[str, Callable[[Case, torch.Generator], Example]] = {
    "recurrence": _recurrence,
    "concat": _concat,
    "add": _add,
    "expand_logits": _expand_logits,
}
