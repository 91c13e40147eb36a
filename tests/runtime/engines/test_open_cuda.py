"""Engines of a GPU are refused by name where they cannot run, before a weight is read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.config import PRETRAINED

from llmctl.builder import engine_format
from llmctl.builder.engine_format import (
    CONFIG_FILE,
    SCHEMA_VERSION,
    EngineConfig,
    KvCacheSpec,
    Plan,
    PlanTensor,
    write_engine,
)
from llmctl.builder.validation import kernels
from llmctl.errors import NoDevice, OutOfMemory, RebuildNeeded, Unsupported
from llmctl.runtime.engines.host_blocks import BLOCKS_ON_DEVICE
from llmctl.runtime.engines.memory_plan import RESERVED_BYTES
from llmctl.runtime.engines.open_cuda import plan_engines
from llmctl.runtime.open import EngineOptions, check_engines

WIDTH = 1 << 20  # elements of the only weight


def write(folder: Path, capability: str = "9.0", **build: object) -> Path:
    """An engine directory of one bfloat16 weight and no operator."""
    tensors = (
        PlanTensor("w", "weight", "bfloat16", (WIDTH,)),
        PlanTensor("logits", "activation", "float32", ("rows", 128), 0),
    )
    cache = KvCacheSpec(2, 2, 64, 32, "bfloat16", (0, 0))
    plan = Plan(tensors, (), cache, {"logits": "logits"}, 512 * 40, 256, 40, scratch_bytes=1000)

    def chunks(name: str) -> Iterator[torch.Tensor]:
        yield torch.zeros(WIDTH, dtype=torch.bfloat16)

    folder.mkdir()
    files = write_engine(folder, plan, chunks, lambda _: None)
    limits = {"max_batch_size": 8, "max_seq_len": 512, "max_draft_len": 4, "tokens_per_block": 32}
    limits |= {"max_num_tokens": 128, "kv_cache_dtype": "bfloat16"}
    config = EngineConfig(
        version=SCHEMA_VERSION,
        backend="cuda",
        pretrained_config=PRETRAINED,
        build_config={**limits, "speculative_decoding_mode": 2, **build},
        plugin_config={},
        source={},
        tokenizer={"hash": None, "vocab_size": None},
        versions={},
        command="",
        files=files,
        compute_capability=capability,
    )
    (folder / CONFIG_FILE).write_text(config.to_json())
    return folder


@pytest.fixture(autouse=True)
def any_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """What plans must be is asked in tests/builder/validation; these have no operators."""
    monkeypatch.setattr(engine_format, "check_plan", lambda config, plan: None)
    monkeypatch.setattr(kernels, "check_kernels", lambda config, plan, stored: None)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """What torch says of a GPU; tests change it."""
    found: dict[str, object] = {"capability": (9, 0), "memory": (70 * 10**9, 80 * 10**9)}
    found["sms"] = 132

    def properties(device: int) -> SimpleNamespace:
        return SimpleNamespace(multi_processor_count=found["sms"])

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: found["capability"])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: found["memory"])
    return found


def test_without_a_gpu_the_message_says_what_torch_found(
    tmp_path: Path, no_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = EngineOptions(write(tmp_path / "engine"))
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(NoDevice, match=r"9\.0.*is built without CUDA") as refused:
        check_engines(options)
    assert "--backend cpu" in refused.value.fix and refused.value.exit_code == 3
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(NoDevice, match="finds no CUDA device"):
        check_engines(options)


def test_another_compute_capability_needs_another_build(
    tmp_path: Path, gpu: dict[str, object]
) -> None:
    gpu["capability"] = (8, 0)
    with pytest.raises(RebuildNeeded, match=r"for compute capability 9\.0; NVIDIA A100 has 8\.0"):
        check_engines(EngineOptions(write(tmp_path / "engine")))


def test_a_card_with_too_few_multiprocessors_is_refused_with_both_counts(
    tmp_path: Path, gpu: dict[str, object]
) -> None:
    options = EngineOptions(write(tmp_path / "engine"))
    gpu["sms"] = 114  # an H100 PCIe
    with pytest.raises(RebuildNeeded, match="need 132 multiprocessors.* has 114") as refused:
        check_engines(options)
    assert "MIG" in refused.value.fix and "--backend cpu" in refused.value.fix
    with pytest.raises(RebuildNeeded, match="has 114"):
        plan_engines({"target": options.engine_dir})
    gpu["sms"] = 132
    check_engines(options)


def test_threads_are_refused_for_engines_of_a_gpu(tmp_path: Path, gpu: dict[str, object]) -> None:
    with pytest.raises(Unsupported, match="--num-threads is for cpu engines; this one is cuda"):
        check_engines(EngineOptions(write(tmp_path / "engine"), num_threads=2))


def test_a_pair_is_planned_together_from_its_headers(
    tmp_path: Path, gpu: dict[str, object]
) -> None:
    target, draft = write(tmp_path / "target"), write(tmp_path / "draft")
    pair = plan_engines({"target": target, "draft": draft})
    roles = [engine.role for engine in pair.memory.engines]
    assert roles == ["target", "draft"] and pair.device_name == "NVIDIA A100"
    assert all(engine.weight_bytes == 2 * WIDTH for engine in pair.memory.engines)
    assert pair.memory.engines[0].scratch_bytes > pair.memory.engines[1].scratch_bytes == 1000
    blocks = 2 * 8 * 16  # twice the batch at full length
    assert (pair.memory.kv_cache.num_blocks, pair.memory.kv_cache.limited_by) == (
        blocks,
        "max_batch_size",
    )
    assert plan_engines({"target": target}, max_tokens=64).memory.kv_cache.num_blocks == 2


def test_memory_that_already_holds_the_target_is_not_counted_twice(
    tmp_path: Path, gpu: dict[str, object]
) -> None:
    folder = write(tmp_path / "target")
    wanted = plan_engines({"target": folder}).memory
    free, total = gpu["memory"]
    gpu["memory"] = (free - 2 * WIDTH, total)
    ahead = SimpleNamespace(held_bytes=2 * WIDTH)
    planned = plan_engines({"target": folder}, ahead=ahead)
    assert planned.memory == wanted and planned.files["target"].ahead is ahead


def test_a_host_tier_has_buffers_on_the_device(tmp_path: Path, gpu: dict[str, object]) -> None:
    folders = {role: write(tmp_path / role) for role in ("target", "draft")}
    without, with_tier = (
        plan_engines(folders, has_host_tier=tier).memory for tier in (False, True)
    )
    for before, after in zip(without.engines, with_tier.engines, strict=True):
        buffers = after.scratch_bytes - before.scratch_bytes
        assert buffers == BLOCKS_ON_DEVICE * before.kv_bytes_per_block > 0


def test_engines_that_do_not_fit_are_refused_with_numbers(
    tmp_path: Path, gpu: dict[str, object]
) -> None:
    gpu["memory"] = (RESERVED_BYTES + 3 * WIDTH, 80 * 10**9)
    target, draft = write(tmp_path / "target"), write(tmp_path / "draft")
    with pytest.raises(OutOfMemory, match="target 0.00 GB.*draft 0.00 GB.*0.54 GB free of 80.00"):
        plan_engines({"target": target, "draft": draft})


def test_both_engines_are_asked_for_their_device(tmp_path: Path, gpu: dict[str, object]) -> None:
    target, draft = write(tmp_path / "target"), write(tmp_path / "draft", capability="10.0")
    assert json.loads((draft / CONFIG_FILE).read_text())["compute_capability"] == "10.0"
    with pytest.raises(RebuildNeeded, match=r"10\.0"):
        plan_engines({"target": target, "draft": draft})


def test_the_plan_counts_generated_weights(tmp_path: Path, gpu: dict[str, object]) -> None:
    from llmctl.runtime.engines.engine_file import EngineFile

    file = EngineFile.open(write(tmp_path / "engine"))
    made = PlanTensor("made", "weight", "bfloat16", (WIDTH,), is_stored=False)
    plan = replace(file.plan, tensors=(*file.plan.tensors, made))
    assert replace(file, plan=plan).memory("target").weight_bytes == 4 * WIDTH
