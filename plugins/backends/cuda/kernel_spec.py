"""What an operator defines for its CUDA kernels: which binaries exist, and how a step launches
them.

`plugins/ops/<op>/kernel.py` has two functions:

    kernels(call, limits) -> list[KernelSpec]        at build: every binary a step may need
    launches(call, env, shape) -> list[Launch]       at run: what one step launches, in order

Both are pure. `call` has meta tensors at build and device tensors at run; a `Launch` refers to
tensors, not addresses, so the same description runs on a GPU (`program.py`) and, if the kernel is
Triton, in Triton's interpreter on CPU tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from llmctl.plugins.backends.cuda.arch import HOPPER

if TYPE_CHECKING:
    import torch

    from llmctl.plugins.core.calls import Extent
    from llmctl.plugins.ops.lookahead.arrays import LookaheadSizes

Constant = int | float | str | bool


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """One binary. Two specs with the same name must be equal.

    `source` is "package.module:function" for Triton, or a path below plugins/ for CUDA C++.
    `arguments` are the kernel's run-time parameters in order: "*bf16", "*fp16", "*fp32",
    "*fp8e4nv", "*i32", "*i64", "*u8" (pointers, 16-byte aligned), "i32", "i64", "fp32", or
    "tensor_map" (CUDA only: a 128-byte CUtensorMap by value).
    `constants` are Triton constexprs by name, or macros of a CUDA source.
    """

    name: str
    source: str
    arguments: tuple[str, ...]
    constants: Mapping[str, Constant] = field(default_factory=dict)
    entry: str = ""  # CUDA: the extern "C" function
    num_warps: int = 4
    num_stages: int = 3  # Triton's software pipelining
    shared_bytes: int = 0  # CUDA: dynamic shared memory (Triton decides its own)
    cluster: int = 1  # thread blocks per cluster, along x
    unused_on: str = ""  # a compute capability on which launches always use another kernel instead

    @property
    def is_triton(self) -> bool:
        """True for a Triton function."""
        return ":" in self.source


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The largest step an engine may see, and the cache its steps read."""

    max_num_tokens: int
    max_num_rows: int
    max_batch_size: int
    max_seq_len: int
    max_draft_len: int
    tokens_per_block: int
    kv_dtype: str  # torch name
    num_sms: int = HOPPER.num_sms
    lookahead: LookaheadSizes | None = None  # of windows in device rounds; None: no such rounds
    fp8_generation: bool = False  # attention of every token has FP8 products; trees have none

    @property
    def takes_trees(self) -> bool:
        """Whether the engine verifies trees of drafts: two may branch."""
        return self.max_draft_len > 1 and not self.fp8_generation


@dataclass(frozen=True, slots=True)
class StepShape:
    """The integers of one step that decide grids. With padding, extents count the padding.

    Padding tokens have slot -1 and belong to no request; padding requests have kv_len 0 and no
    tokens.
    """

    num_tokens: int
    num_requests: int
    num_rows: int
    max_query_len: int  # most tokens of one request
    max_kv_len: int  # no request's kv_len is larger
    max_tree_len: int = 0  # most keys of a request from its tree's root on; 0: there is none
    # Of the requests so many at least have one token: they are no context chunks.
    num_single: int = 0
    best_only: bool = False  # best ids, or draws, are taken: logits stay with ranks, or nowhere
    # So many requests at least have no more tokens than kernels for few compute; 0 unless
    # `StepLimits.fp8_generation`, whose chunks take room by their number.
    num_short: int = 0


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """The integer arrays of a step (`StepInputs`) in device memory, at their maximum sizes.

    All int32. Fixed addresses: captured graphs read whatever was written there last.
    """

    token_ids: torch.Tensor  # [max_num_tokens]
    position_ids: torch.Tensor  # [max_num_tokens]
    cu_q: torch.Tensor  # [max_batch_size + 1]
    kv_len: torch.Tensor  # [max_batch_size]
    block_tables: torch.Tensor  # [max_batch_size, max_blocks]
    slot_mapping: torch.Tensor  # [max_num_tokens]; -1: write nothing
    logit_rows: torch.Tensor  # [max_num_rows]
    tree_start: torch.Tensor  # [max_batch_size]; of a step with trees (`Trees`), as what follows
    tree_root: torch.Tensor  # [max_batch_size]: the position of the root, where there is a tree
    paths: torch.Tensor  # [max_num_rows, max_draft_len + 1]
    context_end: torch.Tensor  # [max_batch_size]


def step_shapes(limits: StepLimits) -> dict[str, tuple[int, ...]]:
    """The maximum shape of each array of a `DeviceStep`."""
    tokens, rows, batch = limits.max_num_tokens, limits.max_num_rows, limits.max_batch_size
    return {
        "token_ids": (tokens,),
        "position_ids": (tokens,),
        "cu_q": (batch + 1,),
        "kv_len": (batch,),
        "block_tables": (batch, -(-limits.max_seq_len // limits.tokens_per_block)),
        "slot_mapping": (tokens,),
        "logit_rows": (rows,),
        "tree_start": (batch,),
        "tree_root": (batch,),
        "paths": (rows, limits.max_draft_len + 1),
        "context_end": (batch,),
    }


Parts = Callable[["torch.Tensor", int], tuple["torch.Tensor", ...]]
"""parts(x, ranks): the tensors that are to every rank of so many what x is to one, in their
order."""


def own_part(x: torch.Tensor, ranks: int) -> tuple[torch.Tensor, ...]:
    """`Parts` of a program of one rank."""
    assert ranks == 1, f"a program of one rank computes what {ranks} ranks have parts of"
    return (x,)


@dataclass(frozen=True, slots=True)
class Peers:
    """What a rank with a GPU of its own shares with the others (peers.py)."""

    rank: int
    num_ranks: int
    bases: torch.Tensor  # int64 [num_ranks]: every rank's buffer, as this one has it mapped
    state: torch.Tensor  # int32 [4]: the number of the next launch, and what counts its blocks
    lost: torch.Tensor  # int32 [4], pinned: not 0 once a rank does not come; 1 + its number
    slot_bytes: int  # of what one rank gives in one launch
    limit_ns: int  # how long a launch waits for a rank


@dataclass(frozen=True, slots=True)
class LaunchEnv:
    """What a launch may use besides the tensors of the call."""

    step: DeviceStep
    kv_cache: torch.Tensor  # [num_layers, num_blocks, 2, num_kv_heads, tokens_per_block, head_size]
    limits: StepLimits
    extent: Extent  # whether this call processes the step's tokens or its rows
    scratch: Callable[[str, tuple[int, ...], torch.dtype], torch.Tensor]
    """scratch(name, shape, dtype): zeroed once when first asked for, then the same tensor for every
    call that asks for that name; whoever uses it leaves counters at zero again."""
    use_pdl: bool = True  # false in the interpreter and on other GPUs than Hopper's
    parts: Parts = own_part  # of operators over ranks, where all ranks are on this device
    peers: Peers | None = None  # where each has a device of its own

    def count(self, shape: StepShape) -> int:
        """Leading extent of the call's activations in this step."""
        return shape.num_tokens if self.extent == "tokens" else shape.num_rows


@dataclass(frozen=True, slots=True)
class TensorMap:
    """A 2-D TMA descriptor: boxes of [box_rows, box_columns] of a row-major tensor.

    `swizzle` is the shared-memory swizzle in bytes (0 or 128). Elements outside read as zero.
    """

    tensor: torch.Tensor  # [rows, columns], contiguous
    box_rows: int
    box_columns: int
    swizzle: int = 128


@dataclass(frozen=True, slots=True)
class PointerTable:
    """An array in device memory of the tensors' addresses, 0 for none: an argument "*i64"."""

    tensors: tuple[torch.Tensor | None, ...]


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch: arguments in the spec's order, tensors where it has pointers."""

    spec: KernelSpec
    grid: tuple[int, int, int]
    arguments: tuple[torch.Tensor | TensorMap | PointerTable | int | float, ...]
