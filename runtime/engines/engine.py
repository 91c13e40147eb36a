"""An engine ready to run: the plan bound to its weights, an arena and a paged KV cache.

Everything is bound once; a step passes the packed inputs and gets logits back. What differs between
backends (where memory lies, who executes the plan) is in `runtime.engines.cpu_engine` and
`runtime.engines.cuda_engine`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from llmctl.builder.engine_format import (
    BASE,
    EngineConfig,
    Plan,
    PlanTensor,
    read_engine_config,
)
from llmctl.errors import Unsupported
from llmctl.plugins.backends.cpu.ranks import Ranks
from llmctl.plugins.core.calls import OpCall, StepInputs
from llmctl.plugins.ops.paged_attention.fp8_context import Fp8Tokens
from llmctl.plugins.ops.sampling.spec import Logits
from llmctl.runtime.kv_cache import Arrival, BlockCopy, BlockHolder, CopyKind, Move
from llmctl.runtime.kv_cache.attention_windows import WindowOptions, apply_windows

if TYPE_CHECKING:
    from llmctl.plugins.backends.cpu.beam_search import CpuBeamSearch

NO_WINDOWS = WindowOptions()


class Engine(ABC):
    """What every backend's engine has. Not thread-safe: one step at a time.

    `run` takes a packed step and returns logits [rows, vocab_size] float32, valid until the next
    `run`, or BestIds (`StepInputs.best_only`). `allocate_kv_cache` must be called once before the
    first step.
    """

    weight_bytes: int
    onboards_aside = False
    is_asynchronous = False  # True where `run` returns before the step has been computed

    def __init__(self, config: EngineConfig, plan: Plan) -> None:
        self.config = config
        self.plan = plan
        build = config.build_config
        self.vocab_size = int(config.pretrained_config["vocab_size"])
        self.max_seq_len = int(build["max_seq_len"])
        self.max_batch_size = int(build["max_batch_size"])
        self.max_num_tokens = plan.max_num_tokens
        self.max_num_rows = plan.max_num_rows
        self.max_draft_len = int(build["max_draft_len"])
        self._outputs: dict[str, torch.Tensor] = {}
        self.shares_logits = any(
            op.op == "all_gather" and op.attributes["ranks"] != 1 for op in plan.ops
        )
        products = plan.fp8_tokens
        # Two drafts may branch, but there are no kernels for trees where every token has FP8
        # products.
        self.takes_trees = self.max_draft_len > 1 and products is not Fp8Tokens.ALL
        self.tokens_per_block = plan.kv_cache.tokens_per_block
        self.context_group = products.group

    @property
    def kv_bytes_per_block(self) -> int:
        """Bytes one block takes over all layers, those of heads included, K and V."""
        return kv_bytes_per_block(self.plan)

    @property
    def head_caches(self) -> Mapping[str, BlockHolder]:
        """The KV caches of heads that attend, by name (`Plan.head_caches`). They have the block ids
        of the engine's own cache, and are allocated with it."""
        return {}

    @abstractmethod
    def allocate_kv_cache(self, num_blocks: int) -> None:
        """Make room for `num_blocks` blocks. Raises OutOfMemory."""

    @abstractmethod
    def copy_block(self, source: int, destination: int) -> None:
        """Copy one block over all layers (reuse of a partly matching block)."""

    def allocate_host_blocks(self, num_blocks: int) -> None:
        """Make room in host memory for blocks that leave the device. Raises OutOfMemory, and
        Unsupported where the backend cannot."""
        raise Unsupported(
            f"blocks in host memory are not available on backend {self.config.backend!r}",
            fix="leave --kv-cache-host-memory-bytes out",
        )

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> Arrival | None:
        """Start copies in order, before the next step; see StepRunner."""
        for copy in copies:
            assert copy.kind is CopyKind.WITHIN, "allocate_host_blocks comes first"
            self.copy_block(copy.src_block, copy.dst_block)
        return None

    @abstractmethod
    def compact(self, moves: Sequence[Sequence[Move]]) -> None:
        """Move keys and values of all layers between slots, for each request in order, after the
        steps and copies before; see StepRunner."""

    def output(self, name: str) -> torch.Tensor:
        """What the last step computed of an output of the plan, valid until the next one: as many
        rows as the largest step has tokens (or rows of logits), the step's own first."""
        if name not in self._outputs:
            raise Unsupported(
                f"the engine was built without the output {name!r}; it has "
                f"{', '.join(self._outputs)}",
                fix="build it again with that output",
            )
        return self._outputs[name]

    @abstractmethod
    def run(self, step: StepInputs) -> Logits:
        """Execute one packed step; logits of step.logit_rows in that order."""

    @abstractmethod
    def run_head(self, name: str, step: StepInputs) -> dict[str, torch.Tensor]:
        """Execute a head of the plan, a graph beside the one that `run` executes.

        The step says how many tokens and rows the head has, and for those that embed tokens or
        gather rows, which (`pack_rows` in step.py packs one of rows alone). Inputs that no graph
        computes are written before (`hand_on`, `give_rows`), or keep what they had since the last
        `run`. Outputs, as many rows as the step has tokens or rows, lie where the engine computes
        and are valid until the same head runs again, or `run`; of several ranks each has its own.
        Raises Unsupported for a head that the engine does not have.
        """

    @abstractmethod
    def hand_on(self, source: str, head: str, count: int) -> None:
        """Copy the first `count` rows of what a head, `source`, left to the inputs of the same
        names of a head, those that no graph computes."""

    @abstractmethod
    def give_rows(
        self, head: str, name: str, sources: Sequence[torch.Tensor], rows: NDArray[np.int64]
    ) -> None:
        """Copy `rows` of the engine's own tensors, outputs of any graph, side by side to the first
        rows of an input of a head."""

    @abstractmethod
    def as_logits(self, output: torch.Tensor) -> Logits:
        """An output [rows, vocab_size] of `run_head` as sampling takes it."""

    @abstractmethod
    def top_ids(self, logits: Sequence[torch.Tensor], count: int) -> NDArray[np.int64]:
        """[len(logits), rows, count] on the host: the ids of the largest of each row, the largest
        first, of outputs of `run_head` [rows, vocab_size]. Waits for them."""

    def compiled_search(
        self, first: str, following: str, states: Sequence[str]
    ) -> CpuBeamSearch | None:
        """Beam searches by a recurrent head, two of the engine's heads that hand `states` on, in
        one call each; None where the engine runs such a head step by step."""
        return None

    @abstractmethod
    def top_log_probs(
        self, logits: torch.Tensor, count: int
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """(ids, log-probabilities) [rows, count] on the host, of the largest of each row, the
        largest first, of an output of `run_head` [rows, vocab_size]. Waits for it."""


def open_cpu_engine(
    engine_dir: Path, windows: WindowOptions = NO_WINDOWS, ranks: Ranks | None = None
) -> Engine:
    """Load an engine directory of the cpu backend; `open_cuda` loads those of a GPU.

    `windows` narrow the model's own. ranks: those that run it together, of which this process is
    one; None: it has one rank. Raises BadConfig for windows that cannot be, EngineNotFound,
    CorruptEngine, RebuildNeeded (see engine_format), OutOfMemory where the rotary tables do not
    fit, and Unsupported for another backend.
    """
    config = read_engine_config(engine_dir)
    if config.backend != "cpu":
        raise Unsupported(
            f"the engine was built for backend {config.backend!r}; 'cpu' is wanted here",
            fix="rebuild with: llmctl build --backend cpu",
        )
    from llmctl.runtime.engines.cpu_engine import CpuEngine
    from llmctl.runtime.engines.rotary_tables import open_with_tables

    plan, weights = open_with_tables(engine_dir, 0 if ranks is None else ranks.rank)
    plan = apply_windows(plan, windows, int(config.build_config["max_seq_len"]), config.backend)
    return CpuEngine(config, plan, weights, ranks)


def bind_plan(
    plan: Plan, weights: Mapping[str, torch.Tensor], arena: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Every tensor of the plan by name: weights as given, activations as views of the arena
    (uint8 [plan.arena_bytes])."""
    return {
        tensor.name: weights[tensor.name]
        if tensor.kind == "weight"
        else _activation(plan, tensor, arena)
        for tensor in plan.tensors
    }


def make_calls(plan: Plan, tensors: Mapping[str, torch.Tensor], graph: str = BASE) -> list[OpCall]:
    """The operators of a graph with their names resolved; arrays of the step (`step.`) are the
    program's own."""
    return [
        OpCall(
            op=op.op,
            name=op.name,
            inputs={r: tensors[name] for r, name in op.inputs.items() if not _is_step(name)},
            outputs={role: tensors[name] for role, name in op.outputs.items()},
            attributes=op.attributes,
            tactic=op.tactic,
        )
        for op in plan.graphs[graph].ops
    ]


def _is_step(name: str) -> bool:
    return name.startswith("step.")


def kv_bytes_per_block(plan: Plan) -> int:
    """Bytes one block of the plan's caches takes over all layers, K and V."""
    return sum(block_bytes(plan, name) for name in plan.caches)


def block_bytes(plan: Plan, name: str = "") -> int:
    """Bytes one block of one of `Plan.caches` takes over its layers, K and V."""
    dtype: torch.dtype = getattr(torch, plan.caches[name].dtype)
    return math.prod(kv_cache_shape(plan, 1, name)) * dtype.itemsize


def kv_cache_shape(plan: Plan, num_blocks: int, name: str = "") -> tuple[int, ...]:
    """[num_layers, num_blocks, 2, num_kv_heads, tokens_per_block, head_size] of one of
    `Plan.caches`."""
    cache = plan.caches[name]
    heads = (cache.num_kv_heads, cache.tokens_per_block, cache.head_size)
    return (cache.num_layers, num_blocks, 2, *heads)


def _activation(plan: Plan, tensor: PlanTensor, arena: torch.Tensor) -> torch.Tensor:
    rows = plan.sizes
    shape = [rows[dim] if isinstance(dim, str) else dim for dim in tensor.shape]
    dtype: torch.dtype = getattr(torch, tensor.dtype)
    assert tensor.offset is not None, f"{tensor.name} has no place in the arena"
    end = tensor.offset + dtype.itemsize * math.prod(shape)
    return arena[tensor.offset : end].view(dtype).view(shape)
