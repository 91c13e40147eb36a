"""What config.json says of draft heads (`draft_heads`), and whether the plan has them so.

Drafts are token ids, which the target embeds: logits wider than its vocabulary would lead out of
its embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llmctl.builder.heads.medusa.tree import GRAPH, TOP_K, logits_name
from llmctl.builder.plan import Plan, PlanTensor
from llmctl.builder.speculative_modes import SPECULATIVE_MODES
from llmctl.builder.validation import eagle_heads, lookahead_facts, redrafter_heads
from llmctl.builder.validation.errors import wrong
from llmctl.builder.validation.head_forms import Tensors, require_forms
from llmctl.builder.validation.strict_json import MOST

if TYPE_CHECKING:
    from llmctl.builder.engine_format import EngineConfig


def find_wrong_heads(build: Mapping[str, Any]) -> str | None:
    """Which field of a build_config's draft_heads is not what readers rely on, and how; None: none.
    {}: no heads."""
    found = build.get("draft_heads", {})
    if type(found) is not dict:
        return "build_config.draft_heads is no object"
    if not found:
        return None
    check = _CHECKS.get(build["speculative_decoding_mode"])
    if check is None:
        return "build_config.draft_heads is there, and no head is of the speculative_decoding_mode"
    return check.find_wrong(found, build)


def check_draft_heads(config: EngineConfig, plan: Plan, tensors: Tensors) -> None:
    """Raise CorruptEngine where config.json says that there are heads and the plan has others, and
    for a head that waits for other ranks: each runs its own."""
    for name, graph in plan.heads.items():
        for op in graph.ops:
            if {"ranks", "pushed_to"} & set(op.attributes):
                raise wrong(f"operator {op.name!r} of head {name!r} is over ranks")
    if config.build_config.get("draft_heads"):
        check = _CHECKS[config.build_config["speculative_decoding_mode"]]
        check.check_plan(config, plan, tensors)


def _find_wrong_medusa(found: Mapping[str, Any], build: Mapping[str, Any]) -> str | None:
    for name, least in (("num_heads", 1), ("num_layers", 0)):
        value = found.get(name)
        if type(value) is not int or not least <= value <= MOST:
            return f"build_config.draft_heads.{name} is {value!r}; a whole number is wanted"
    if not _is_tree(found.get("choices"), found["num_heads"]):
        return (
            "build_config.draft_heads.choices is no tree: a list of paths of up to "
            f"{found['num_heads']} ranks below {TOP_K}, each behind what leads to it, is wanted"
        )
    return None


def _is_tree(choices: Any, num_heads: int) -> bool:
    if type(choices) is not list or not choices:
        return False
    known: set[tuple[int, ...]] = {()}
    for path in choices:
        if type(path) is not list or not 1 <= len(path) <= num_heads:
            return False
        if not all(type(rank) is int and 0 <= rank < TOP_K for rank in path):
            return False
        if tuple(path[:-1]) not in known or tuple(path) in known:
            return False
        known.add(tuple(path))
    return True


def _check_medusa(config: EngineConfig, plan: Plan, tensors: Tensors) -> None:
    facts = config.build_config["draft_heads"]
    if set(plan.heads) != {GRAPH}:
        raise wrong(f"config.json has draft heads; the plan has the graphs {sorted(plan.heads)}")
    graph = plan.heads[GRAPH]
    if dict(graph.inputs) != {"hidden": plan.outputs.get("hidden")}:
        raise wrong(f"head {GRAPH!r} reads {dict(graph.inputs)}; the output 'hidden' is wanted")
    names = {logits_name(head) for head in range(facts["num_heads"])}
    if set(graph.outputs) != names:
        found = ", ".join(sorted(graph.outputs)[:8])
        raise wrong(f"head {GRAPH!r} gives {found}; config.json says {facts['num_heads']} heads")
    wanted = ("requests", config.pretrained_config["vocab_size"], "float32")
    require_forms(GRAPH, "output", graph.outputs, dict.fromkeys(names, wanted), tensors)


@dataclass(frozen=True, slots=True)
class _Check:
    """What is asked of the heads of one mode."""

    find_wrong: Callable[[Mapping[str, Any], Mapping[str, Any]], str | None]
    check_plan: Callable[[EngineConfig, Plan, Mapping[str, PlanTensor]], None]


_CHECKS = {
    SPECULATIVE_MODES["medusa"].number: _Check(_find_wrong_medusa, _check_medusa),
    SPECULATIVE_MODES["lookahead_decoding"].number: _Check(
        lookahead_facts.find_wrong, lookahead_facts.check_plan
    ),
    SPECULATIVE_MODES["redrafter"].number: _Check(
        redrafter_heads.find_wrong, redrafter_heads.check_plan
    ),
    SPECULATIVE_MODES["eagle"].number: _Check(eagle_heads.find_wrong, eagle_heads.check_plan),
}
