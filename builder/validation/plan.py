"""The whole check of a plan beside its config.json."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmctl.builder.plan import TENSORRT_OP, Plan
from llmctl.builder.validation.agreement import check_agreement
from llmctl.builder.validation.binaries import check_binaries
from llmctl.builder.validation.dataflow import check_dataflow
from llmctl.builder.validation.decoder import Decoder, Sums
from llmctl.builder.validation.draft_heads import check_draft_heads
from llmctl.builder.validation.errors import wrong
from llmctl.builder.validation.graphs import check_graphs
from llmctl.builder.validation.head_caches import check_head_caches
from llmctl.builder.validation.operators import check_operators
from llmctl.builder.validation.pieces import check_pieces
from llmctl.builder.validation.rotary_tables import check_rotary_tables
from llmctl.builder.validation.schema import check_types
from llmctl.builder.validation.tensors import check_tensors
from llmctl.errors import CorruptEngine
from llmctl.plugins.backends.backend import BACKENDS

if TYPE_CHECKING:
    from llmctl.builder.engine_format import EngineConfig


def check_plan(config: EngineConfig, plan: Plan, *, has_binaries: bool = True) -> None:
    """Raise CorruptEngine where the plan is not one that `build` writes for such a config.json.

    has_binaries: false for a plan that nothing was compiled for, which cannot be written.
    config: with the fields that `find_wrong_field` asks for. Imports no arrays;
    docs/engine_format.md says how long it takes.
    """
    check_types(plan, "plan")
    backend = BACKENDS[config.backend]
    if not plan.ops:
        raise wrong("the plan has no operators")
    tensors = check_tensors(plan, backend)
    check_graphs(plan, tensors)
    check_dataflow(plan, tensors)
    check_rotary_tables(plan, tensors)
    check_operators(plan, tensors, backend, config.pretrained_config["dtype"])
    check_head_caches(config, plan, tensors)
    check_agreement(config, plan, tensors, backend)
    check_draft_heads(config, plan, tensors)
    check_binaries(config, plan, backend)
    has_pieces = any(op.op == TENSORRT_OP for op in plan.ops)
    if has_pieces != backend.compiles_plans:
        raise wrong(f"the plan is not one of backend {backend.name!r}")
    if has_pieces and plan.heads:
        raise wrong(f"the plan has heads, and backend {backend.name!r} runs none")
    if has_pieces and has_binaries:
        check_pieces(plan, tensors)
    elif not has_pieces:
        model, build = config.pretrained_config, config.build_config
        sizes = (build.get("tp_size", 1), build.get("sum_leaves", 1))
        sums = Sums(*sizes, is_packed=backend.packs_linears)
        Decoder(plan, model["num_hidden_layers"], model["tie_word_embeddings"], sums).check()


def require_own_plan(config: EngineConfig, plan: Plan) -> None:
    """The same of a plan that was just made, as its readers will find it. A finding is a bug."""
    try:
        written = Plan.from_json(plan.to_json())
        check_plan(config, written, has_binaries=bool(plan.kernels or plan.trt_pieces))
    except CorruptEngine as error:
        raise AssertionError(f"the plan is not valid: {error}") from error
