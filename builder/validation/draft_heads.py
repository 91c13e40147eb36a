"""What config.json says of draft heads (`draft_heads`), and whether the plan has them so.

Drafts are token ids, which the target embeds: logits wider than its vocabulary would lead out of
its embedding. What is asked of each mode's is in its folder: builder/heads/<mode>/check.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from llmctl.builder.plan import Plan, PlanOp
from llmctl.builder.speculative_modes import mode_of
from llmctl.builder.validation.errors import wrong
from llmctl.builder.validation.head_forms import Tensors

if TYPE_CHECKING:
    from llmctl.builder.engine_format import EngineConfig


def find_wrong_heads(build: Mapping[str, Any]) -> str | None:
    """Which field of a build_config's draft_heads is not what readers rely on, and how; None: none.
    {}: no heads. The speculative_decoding_mode is some mode's."""
    found = build.get("draft_heads", {})
    if type(found) is not dict:
        return "build_config.draft_heads is no object"
    if not found:
        return None
    check = mode_of(build["speculative_decoding_mode"]).check
    if check is None:
        return "build_config.draft_heads is there, and no head is of the speculative_decoding_mode"
    return check.find_wrong(found, build)


def check_draft_heads(config: EngineConfig, plan: Plan, tensors: Tensors) -> None:
    """Raise CorruptEngine where config.json says that there are heads and the plan has others, and
    for a head that meets other ranks otherwise than by gathering what each has of a product."""
    ranks = config.build_config.get("tp_size", 1)
    for name, graph in plan.heads.items():
        for op in graph.ops:
            _check_ranks(name, op, 1 if graph.cache else ranks)
    if config.build_config.get("draft_heads"):
        check = mode_of(config.build_config["speculative_decoding_mode"]).check
        assert check is not None, "find_wrong_heads has passed"
        check.check_plan(config, plan, tensors)


def _check_ranks(head: str, op: PlanOp, ranks: int) -> None:
    """ranks: that run the head; one runs a head that attends, for it alone has the cache."""
    found = op.attributes.get("ranks", ranks if op.op != "all_gather" else None)
    is_gathered = op.op == "all_gather" and ranks > 1
    others = {"pushed_to", "is_partial", "leaves"} & set(op.attributes)
    if others or found != ranks or ("ranks" in op.attributes and not is_gathered):
        raise wrong(f"operator {op.name!r} of head {head!r} is over ranks, which are {ranks}")
