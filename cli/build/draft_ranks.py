"""`llmctl build --draft-tp`: the ranks of an engine that drafts for a target of --tp-size ranks.

One: on GPUs every rank of the target then has it whole, on a CPU rank 0 drafts. Or as many as the
target, each with a share. Everything else of a round is the same, so the draft's own step decides.
Its time is computed, as by --dry-run and inspect: docs/performance/tensor_parallel.md.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from llmctl.cli.inspect.by_ranks import span
from llmctl.cli.inspect.cost import DECODE
from llmctl.cli.inspect.prediction import fastest, predict_on_gpu
from llmctl.errors import BadConfig, Unsupported
from llmctl.plugins.backends.backend import BACKENDS

if TYPE_CHECKING:
    from llmctl.builder.config import BuildRequest
    from llmctl.builder.engine_plan import EnginePlan

AUTO = "auto"
_FIX = "--draft-tp auto, 1 (replicated) or the target's --tp-size (sharded)"


def with_draft_ranks(
    wanted: str | None,
    request: BuildRequest,
    plan: Callable[..., EnginePlan],
    gpu: str | None,
    log: logging.Logger,
) -> BuildRequest:
    """The request with the ranks that `wanted` (--draft-tp) means beside a target of
    request.tp_size, which is logged; unchanged without the option.

    plan: plans an engine of a request. gpu: named for --dry-run; else the one here decides, or the
    usual one of the engine's kind. Raises BadConfig for a number of ranks that no target of so many
    can have beside it, and for what makes the engine a target; Unsupported where the backend has no
    ranks.
    """
    if wanted is None:
        return request
    _require_draft(wanted, request)
    if wanted != AUTO:
        chosen, why = int(wanted), "as requested"
    else:
        chosen, why = _choose(request, partial(plan, with_binaries=False), gpu)
    how = "replicated" if chosen == 1 else "sharded"
    log.info("draft ranks: %d beside a target of %d, %s (%s)", chosen, request.tp_size, how, why)
    return replace(request, tp_size=chosen)


def _require_draft(wanted: str, request: BuildRequest) -> None:
    if request.max_draft_len > 0:
        raise BadConfig(
            f"--draft-tp is for a draft engine; --max-draft-len {request.max_draft_len} makes the "
            "engine a target",
            fix="leave one of the two out; a target has --tp-size ranks",
        )
    if wanted == AUTO:
        return
    if not (wanted.isascii() and wanted.isdecimal()):
        raise BadConfig(f"--draft-tp is {wanted!r}", fix=_FIX)
    if int(wanted) not in (1, request.tp_size):
        raise BadConfig(
            f"--draft-tp {wanted} beside --tp-size {request.tp_size}: a draft engine has one rank, "
            "or as many as its target",
            fix=_FIX,
        )


def _choose(
    request: BuildRequest, plan: Callable[[BuildRequest], EnginePlan], gpu: str | None
) -> tuple[int, str]:
    """(ranks, why)."""
    from llmctl.cli.build.dry_run import choose_memory

    count = request.tp_size
    one = plan(replace(request, tp_size=1))
    backend = BACKENDS[one.config.backend]
    if count == 1:
        return 1, "a target of one rank"
    if count not in (backend.rank_counts or ()):
        raise Unsupported(
            f"--draft-tp beside --tp-size {count}: no engine of the {backend.name} backend runs "
            "with so many ranks",
            fix="--backend cuda or cpu, --tp-size 2, 4 or 8",
        )
    if not backend.on_gpu:
        return 1, "ranks share the cores and memory that one has alone"
    device = choose_memory(backend.name, gpu, None, one.config.compute_capability).gpu
    assert device is not None, "the memory of a GPU"
    try:
        many = plan(request)
    except Unsupported as error:
        return 1, str(error)
    found = {
        ranks: predict_on_gpu(engine.config, engine.plan, DECODE, device).bounds_s
        for ranks, engine in ((1, one), (count, many))
    }
    known = {ranks: bounds for ranks, bounds in found.items() if bounds is not None}
    if len(known) < len(found):
        return 1, f"what {count} {device.name} take for a step is not known"
    times = ", ".join(
        f"{span(*(1e3 * bound for bound in bounds))} ms on {ranks}"
        for ranks, bounds in known.items()
    )
    return fastest(known), f"computed for {device.name}: a step takes {times}"
