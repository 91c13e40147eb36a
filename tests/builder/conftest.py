"""Tiny checkpoints of every family, and one engine run for one sequence at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.bad_checkpoints import (
    FP8,
    LINEARS,
    QUANTIZATION,
    Tensors,
    configure,
)
from support.checkpoint import edit
from support.cuda_build import LIMITS, write_case
from support.mxfp4 import Checkpoints
from support.random_models import make_model
from support.stand_ins import stand_in_kernels
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from llmctl.builder.build import plan_build, run_build
from llmctl.builder.config import BuildRequest
from llmctl.builder.engine_format import Plan, open_engine
from llmctl.plugins.backends.cpu import CpuProgram
from llmctl.plugins.core.calls import OpCall, Program, StepInputs
from llmctl.plugins.core.reference import ReferenceProgram
from llmctl.runtime.engines.rotary_tables import make_rotary_tables

transformers_logging.disable_progress_bar()

PROGRAMS: dict[str, type[Any]] = {"reference": ReferenceProgram, "cpu": CpuProgram}


@pytest.fixture(params=sorted(PROGRAMS))
def program_name(request: pytest.FixtureRequest) -> str:
    """Both backends that execute a plan on this machine."""
    return str(request.param)


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Path]:
    """save(model) -> the folder of its Hugging Face checkpoint."""

    def saved(model: PreTrainedModel, name: str = "checkpoint") -> Path:
        model.save_pretrained(tmp_path / name)
        return tmp_path / name

    return saved


@dataclass
class Engine:
    """One opened engine with a KV cache large enough for one sequence."""

    plan: Plan
    program: Program
    tensors: dict[str, torch.Tensor]
    kv_cache: torch.Tensor

    def output(self, name: str) -> torch.Tensor:
        """An output of the plan, at its largest size."""
        return self.tensors[self.plan.outputs[name]]

    def run(self, tokens: list[int], start: int = 0) -> torch.Tensor:
        """Logits of every token of one step: tokens at positions start, start + 1, ..."""
        positions = np.arange(start, start + len(tokens), dtype=np.int32)
        per_block = self.plan.kv_cache.tokens_per_block
        blocks = np.arange(self.kv_cache.shape[1], dtype=np.int32)[::-1].copy()
        step = StepInputs(
            token_ids=np.array(tokens, np.int32),
            position_ids=positions,
            cu_q=np.array([0, len(tokens)], np.int32),
            kv_len=np.array([start + len(tokens)], np.int32),
            block_tables=blocks[None, :],
            slot_mapping=(blocks[positions // per_block] * per_block + positions % per_block),
            logit_rows=np.arange(len(tokens), dtype=np.int32),
        )
        self.program.run(step, self.kv_cache)
        return self.output("logits")[: len(tokens)].clone()


def open_for_test(folder: Path, program_name: str) -> Engine:
    """The engine bound as the runtime binds it, but to the named program."""
    plan, weights = open_engine(folder)
    arena = torch.empty(plan.arena_bytes + 64, dtype=torch.uint8)
    arena = arena[-arena.data_ptr() % 64 :]
    arena.fill_(0xFF)  # NaN in every dtype: reading what nobody wrote must show
    rows = {"tokens": plan.max_num_tokens, "rows": plan.max_num_rows}
    tensors = dict(weights) | make_rotary_tables(plan)
    for tensor in plan.tensors:
        if tensor.kind == "activation":
            shape = [rows[dim] if isinstance(dim, str) else dim for dim in tensor.shape]
            dtype = getattr(torch, tensor.dtype)
            num_bytes = int(np.prod(shape)) * dtype.itemsize
            assert tensor.offset is not None
            view = arena[tensor.offset : tensor.offset + num_bytes]
            tensors[tensor.name] = view.view(dtype).view(shape)
    calls = [
        OpCall(
            op.op,
            op.name,
            {role: tensors[name] for role, name in op.inputs.items()},
            {role: tensors[name] for role, name in op.outputs.items()},
            op.attributes,
        )
        for op in plan.ops
    ]
    cache = plan.kv_cache
    num_blocks = -(-plan.max_num_tokens // cache.tokens_per_block)
    shape = (cache.num_layers, num_blocks, 2, cache.num_kv_heads, cache.tokens_per_block)
    kv_cache = torch.zeros((*shape, cache.head_size), dtype=getattr(torch, cache.dtype))
    return Engine(plan, PROGRAMS[program_name](calls), tensors, kv_cache)


@pytest.fixture
def build_engine(tmp_path: Path) -> Callable[..., Path]:
    """build_engine(checkpoint, **request fields) -> engine folder; logits for up to 128 tokens.
    Without binaries no kernel is compiled, for tests that look at the plan and its weights."""
    count = 0

    def built(
        checkpoint: Path,
        plugins: dict[str, str] | None = None,
        backend: str = "cpu",
        with_binaries: bool = True,
        **fields: Any,
    ) -> Path:
        nonlocal count
        count += 1
        request = BuildRequest(
            **{"max_batch_size": 2, "max_num_tokens": 128, "max_draft_len": 63, **fields}
        )
        folder = tmp_path / f"engine{count}"
        options = {"backend": backend, "plugins": plugins, "with_binaries": with_binaries}
        run_build(plan_build(checkpoint, request, **options), folder)
        return folder

    return built


@pytest.fixture
def open_test_engine() -> Callable[[Path, str], Engine]:
    """open_test_engine(folder, program name) -> Engine."""
    return open_for_test


@pytest.fixture
def new_model() -> Callable[..., PreTrainedModel]:
    """new_model(family, **config fields) -> a random Hugging Face model."""
    return make_model


@pytest.fixture(scope="module")
def module_model() -> Callable[..., PreTrainedModel]:
    """`new_model` for fixtures that a module shares."""
    return make_model


@pytest.fixture(scope="session")
def mxfp4_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """Checkpoints of MXFP4 weights, each quantized once; a test that changes one copies it."""
    return Checkpoints(tmp_path_factory.mktemp("mxfp4"), make_model)


@pytest.fixture
def some_tokens() -> Callable[..., list[int]]:
    """some_tokens(count, vocabulary) -> random token ids, the same every time."""

    def tokens(count: int, vocab_size: int = 131) -> list[int]:
        return np.random.default_rng(7).integers(0, vocab_size, count).tolist()

    return tokens


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """checkpoints(case) -> its folder, made once."""
    made: dict[str, Path] = {}

    def checkpoint(case: str) -> Path:
        if case not in made:
            made[case] = write_case(tmp_path_factory.mktemp("checkpoint"), case)
        return made[case]

    return checkpoint


@pytest.fixture(scope="module")
def cuda_engines(
    checkpoints: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """cuda_engines(case) -> the folder of its cuda engine, built once; with kernels that do
    nothing."""
    made: dict[str, Path] = {}

    def engine(case: str) -> Path:
        if case not in made:
            folder = tmp_path_factory.mktemp("engine") / "cuda"
            with stand_in_kernels():
                planned = plan_build(checkpoints(case), BuildRequest(**LIMITS), backend="cuda")
                run_build(planned, folder)
            made[case] = folder
        return made[case]

    return engine


@pytest.fixture
def stand_ins() -> Iterator[None]:
    """The engines of a test that asks which kernels there are, not what is in them."""
    with stand_in_kernels():
        yield


@pytest.fixture
def plain(new_model, save) -> Path:
    """An unquantized checkpoint of one layer."""
    return Path(save(new_model("llama", num_hidden_layers=1)))


@pytest.fixture
def quantized(plain: Path) -> Path:
    """The same in FP8 with KV scales, written by hand."""

    def change(tensors: Tensors) -> None:
        for name in LINEARS:
            module = f"model.layers.0.{name}"
            weight = tensors[f"{module}.weight"]
            scale = weight.abs().max() / 448
            tensors[f"{module}.weight"] = (weight / scale).to(FP8)
            tensors[f"{module}.weight_scale"] = scale
            tensors[f"{module}.input_scale"] = torch.tensor(0.01)
        for part in "kv":
            tensors[f"model.layers.0.self_attn.{part}_proj.{part}_scale"] = torch.tensor(0.01)

    configure(plain, quantization_config={**QUANTIZATION, "kv_cache_scheme": "FP8"})
    return edit(plain, change)
