"""What config.json says of a ReDrafter head, and whether the plan has it so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from llmctl.builder.heads.redrafter.names import (
    CARRY,
    CONTEXT,
    FIRST,
    MOST_BEAMS,
    MOST_DRAFTS,
    NEXT,
    RECURRENCES,
)
from llmctl.builder.plan import Plan
from llmctl.builder.ranks import divides_rows
from llmctl.builder.validation.errors import wrong
from llmctl.builder.validation.head_forms import (
    Form,
    HeadCheck,
    Tensors,
    logits_forms,
    require_forms,
)
from llmctl.builder.validation.strict_json import MOST

if TYPE_CHECKING:
    from llmctl.builder.engine_format import EngineConfig

_SIZES = (
    ("num_layers", 0, MOST),
    ("exit_dim", 1, MOST),
    ("num_beams", 1, MOST_BEAMS),
    ("draft_len_per_beam", 1, MOST_DRAFTS),
)


def find_wrong(found: Mapping[str, Any], build: Mapping[str, Any]) -> str | None:
    """Which of its fields is not what readers rely on, and how; None: none."""
    for name, least, most in _SIZES:
        value = found.get(name)
        if type(value) is not int or not least <= value <= most:
            return (
                f"build_config.draft_heads.{name} is {value!r}; a whole number from {least} to "
                f"{most} is wanted"
            )
    recurrence, is_greedy = found.get("recurrence"), found.get("greedy_search")
    if type(recurrence) is not str or recurrence not in RECURRENCES:
        known = ", ".join(RECURRENCES)
        return f"build_config.draft_heads.recurrence is {recurrence!r}; one of {known} is wanted"
    if type(is_greedy) is not bool:
        return f"build_config.draft_heads.greedy_search is {is_greedy!r}; true or false is wanted"
    drafts = found["num_beams"] * found["draft_len_per_beam"]
    if drafts != build["max_draft_len"]:
        return (
            f"build_config.draft_heads has beams of {drafts} drafts together; max_draft_len is "
            f"{build['max_draft_len']}"
        )
    return None


def check_plan(config: EngineConfig, plan: Plan, tensors: Tensors) -> None:
    """Raise CorruptEngine where the plan's graphs are not the two of such a head."""
    if set(plan.heads) != {FIRST, NEXT}:
        raise wrong(f"config.json has a ReDrafter head; the plan has {sorted(plan.heads)}")
    model = config.pretrained_config
    dtype, width = model["dtype"], model["hidden_size"]
    ranks = config.build_config["tp_size"]
    has_products = config.build_config["draft_heads"]["recurrence"] != "sum"
    is_shared = has_products and divides_rows(width, ranks)
    for graph, rows in ((FIRST, "requests"), (NEXT, "beams")):
        head = plan.heads[graph]
        carried = width // ranks if is_shared else width  # a rank's rows of a product
        states: dict[str, Form] = {CONTEXT: (rows, 2 * width, dtype), CARRY: (rows, carried, dtype)}
        outputs = {**states, **logits_forms("logits", rows, config)}
        if set(head.outputs) != set(outputs):
            raise wrong(f"head {graph!r} gives {', '.join(sorted(head.outputs)[:8])}")
        require_forms(graph, "output", head.outputs, outputs, tensors)
        if graph == FIRST and dict(head.inputs) != {"hidden": plan.outputs.get("hidden")}:
            raise wrong(f"head {graph!r} reads {dict(head.inputs)}; the output 'hidden' is wanted")
        if graph == NEXT and set(plan.given_inputs(graph)) != set(states):
            raise wrong(f"head {graph!r} reads {dict(head.inputs)}; states are wanted")
        if graph == NEXT:
            require_forms(graph, "input", head.inputs, states, tensors)


CHECK = HeadCheck(find_wrong, check_plan)
