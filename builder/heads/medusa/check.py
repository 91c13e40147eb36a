"""What config.json says of Medusa heads, and whether the plan has them so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from llmctl.builder.heads.medusa.tree import GRAPH, TOP_K, logits_name
from llmctl.builder.plan import Plan
from llmctl.builder.validation.errors import wrong
from llmctl.builder.validation.head_forms import (
    HeadCheck,
    Tensors,
    logits_forms,
    require_forms,
)
from llmctl.builder.validation.strict_json import MOST

if TYPE_CHECKING:
    from llmctl.builder.engine_format import EngineConfig


def find_wrong(found: Mapping[str, Any], build: Mapping[str, Any]) -> str | None:
    """Which of its fields is not what readers rely on, and how; None: none."""
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


def check_plan(config: EngineConfig, plan: Plan, tensors: Tensors) -> None:
    """Raise CorruptEngine where the plan's graph is not that of such heads."""
    facts = config.build_config["draft_heads"]
    if set(plan.heads) != {GRAPH}:
        raise wrong(f"config.json has draft heads; the plan has the graphs {sorted(plan.heads)}")
    graph = plan.heads[GRAPH]
    if dict(graph.inputs) != {"hidden": plan.outputs.get("hidden")}:
        raise wrong(f"head {GRAPH!r} reads {dict(graph.inputs)}; the output 'hidden' is wanted")
    names = {logits_name(head) for head in range(facts["num_heads"])}
    wanted = {
        k: form for name in names for k, form in logits_forms(name, "requests", config).items()
    }
    if set(graph.outputs) != set(wanted):
        found = ", ".join(sorted(graph.outputs)[:8])
        raise wrong(f"head {GRAPH!r} gives {found}; config.json says {facts['num_heads']} heads")
    require_forms(GRAPH, "output", graph.outputs, wanted, tensors)


CHECK = HeadCheck(find_wrong, check_plan)
