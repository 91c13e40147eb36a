"""What config.json says of an EAGLE head, and whether the plan has it so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from llmctl.builder.heads.eagle.names import (
    CACHE,
    EXTEND,
    MOST_DRAFTS,
    MOST_LAYERS,
    NEXT,
    ONE_LAYER,
    STATE,
    feature_inputs,
    tap_name,
)
from llmctl.builder.plan import Plan
from llmctl.builder.validation.errors import wrong
from llmctl.builder.validation.head_forms import Form, HeadCheck, Tensors, require_forms
from llmctl.builder.validation.strict_json import MOST

if TYPE_CHECKING:
    from llmctl.builder.engine_format import EngineConfig

_SIZES = (
    *("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_size"),
    "draft_vocab_size",
)
_FLAGS = (
    *("is_reduced", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"),
    *("has_qk_norm", "has_fc_bias", "has_embedding"),
)


def find_wrong(found: Mapping[str, Any], build: Mapping[str, Any]) -> str | None:
    """Which of its fields is not what readers rely on, and how; None: none."""
    prefix = "build_config.draft_heads"
    for name in (*_SIZES, "num_beams"):
        value, most = found.get(name), MOST_DRAFTS if name == "num_beams" else MOST
        if type(value) is not int or not 1 <= value <= most:
            return f"{prefix}.{name} is {value!r}; a whole number from 1 to {most} is wanted"
    if found.get("version") not in (1, 3):
        return f"{prefix}.version is {found.get('version')!r}; 1 or 3 is wanted"
    for name in _FLAGS:
        if type(found.get(name)) is not bool:
            return f"{prefix}.{name} is {found.get(name)!r}; true or false is wanted"
    taps = found.get("taps")
    if type(taps) is not list or not 1 <= len(taps) <= 64 or not all(map(_is_layer, taps)):
        return f"{prefix}.taps is {taps!r:.100}; a list of layers is wanted"
    windows = found.get("windows", ONE_LAYER)
    if (
        type(windows) is not list
        or not 1 <= len(windows) <= MOST_LAYERS
        or not all(map(_is_layer, windows))
    ):
        return f"{prefix}.windows is {windows!r:.100}; the window of each layer is wanted"
    rope = found.get("rope")
    if type(rope) is not dict or not all(
        type(value) in (int, float, dict) for value in rope.values()
    ):
        return f"{prefix}.rope is {rope!r:.100}; fields of a RoPE are wanted"
    if type(rope.get("rope_parameters", {})) is not dict:
        return f"{prefix}.rope.rope_parameters is {rope['rope_parameters']!r}; an object is wanted"
    if not 1 <= build["max_draft_len"] <= MOST_DRAFTS:
        return (
            f"build_config.max_draft_len is {build['max_draft_len']}; 1 to {MOST_DRAFTS} with heads"
        )
    return None


def _is_layer(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MOST


def check_plan(config: EngineConfig, plan: Plan, tensors: Tensors) -> None:
    """Raise CorruptEngine where the plan's graphs are not the two of such a head."""
    if set(plan.heads) != {EXTEND, NEXT} or set(plan.head_caches) != {CACHE}:
        raise wrong(f"config.json has an EAGLE head; the plan has {sorted(plan.heads)}")
    model, facts = config.pretrained_config, config.build_config["draft_heads"]
    dtype, width = model["dtype"], facts["hidden_size"]
    cache = plan.head_caches[CACHE]
    found = (cache.num_layers, cache.num_kv_heads, cache.head_size)
    num_layers = len(facts.get("windows", ONE_LAYER))
    if found != (num_layers, facts["num_kv_heads"], facts["head_size"]):
        raise wrong(f"the KV cache of the EAGLE head has layers, heads and size {found}")
    for layer in facts["taps"]:
        name = tap_name(layer)
        if name not in plan.outputs:
            raise wrong(f"the EAGLE head reads {name}, which is no output of the base graph")
        form = ("tokens", model["hidden_size"], dtype)
        require_forms("base", "output", plan.outputs, {name: form}, tensors)
    read = {
        name: ("tokens", len(taps) * model["hidden_size"], dtype)
        for name, taps in feature_inputs(facts["taps"], are_apart=facts["fc_norm"]).items()
    }
    for graph, rows, reads in (
        (EXTEND, "requests", read),
        (NEXT, "beams", {STATE: ("beams", width, dtype)}),
    ):
        head = plan.heads[graph]
        outputs: dict[str, Form] = {
            STATE: (rows, width, dtype),
            "logits": (rows, model["vocab_size"], "float32"),
        }
        if set(head.outputs) != set(outputs) or head.cache != CACHE:
            raise wrong(f"head {graph!r} gives {', '.join(sorted(head.outputs)[:8])}")
        if set(plan.given_inputs(graph)) != set(reads) or set(head.inputs) != set(reads):
            raise wrong(f"head {graph!r} reads {dict(head.inputs)}; {sorted(reads)} is wanted")
        require_forms(graph, "output", head.outputs, outputs, tensors)
        require_forms(graph, "input", head.inputs, reads, tensors)


CHECK = HeadCheck(find_wrong, check_plan)
