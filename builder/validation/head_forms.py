"""The shapes and dtypes of what a head reads and gives, and what is asked of each mode's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llmctl.builder.plan import Dim, Plan, PlanTensor
from llmctl.builder.ranks import row_share
from llmctl.builder.validation.errors import wrong
from llmctl.plugins.core.shares import share_of

if TYPE_CHECKING:
    from llmctl.builder.engine_format import EngineConfig

Tensors = Mapping[str, PlanTensor]
Form = tuple[Dim, ...]  # a shape, then a dtype


@dataclass(frozen=True, slots=True)
class HeadCheck:
    """Of a mode's heads. find_wrong: (draft_heads, build_config) -> which field is not what readers
    rely on, and how; None: none. check_plan raises CorruptEngine where the plan has others."""

    find_wrong: Callable[[Mapping[str, Any], Mapping[str, Any]], str | None]
    check_plan: Callable[[EngineConfig, Plan, Tensors], None]


def logits_forms(name: str, rows: str, config: EngineConfig) -> dict[str, Form]:
    """Of logits that a head puts out by this name, and of what each of several ranks has of it."""
    vocab, ranks = config.pretrained_config["vocab_size"], config.build_config["tp_size"]
    forms: dict[str, Form] = {name: (rows, vocab, "float32")}
    if ranks > 1:
        forms[share_of(name)] = (rows, row_share(vocab, ranks), "float32")
    return forms


def require_forms(
    graph: str, kind: str, found: Mapping[str, str], wanted: Mapping[str, Form], tensors: Tensors
) -> None:
    """Raise CorruptEngine where an input or output of a head has another form than is wanted."""
    for name, form in wanted.items():
        tensor = tensors[found[name]]
        own = (*tensor.shape, tensor.dtype)
        if own != form:
            raise wrong(f"{kind} {name!r} of head {graph!r} is {own}; {form} is wanted")
