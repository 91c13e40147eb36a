"""Engines of a GPU whose plan or binaries were edited are refused by name, without a GPU."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cuda_build import LIMITS
from support.hostile_engine import Change, Edited, HostileEngine
from support.json_edits import ACTIONS, apply

from llmctl.builder.engine_format import open_engine, read_engine_config
from llmctl.builder.validation.kernels import check_launches
from llmctl.cli.inspect.verify import verify_engine
from llmctl.errors import CorruptEngine, LlmctlError
from llmctl.plugins.backends.cuda.arch import HOPPER

ROPE = "layers.0.self_attn.qkv_proj"
VALUES = (0, -1, 1, 7, 2**31, "rows", "tokens", "float32", None, [2], 0.5, {}, True)


@pytest.fixture(scope="module")
def engine(cuda_engines: Callable[[str], Path]) -> HostileEngine:
    return HostileEngine.read(cuda_engines("qwen2 fp8"))


@pytest.fixture
def edited(engine: HostileEngine, tmp_path: Path) -> Edited:
    def edit(change: Change) -> Path:
        changed = engine.copy()
        change(changed)
        return changed.write(tmp_path / "edited")

    return edit


def kernel(engine: HostileEngine, part: str) -> dict[str, Any]:
    """The first kernel with this in its name."""
    return next(each for each in engine.plan["kernels"] if part in each["name"])


def refuse(folder: Path, match: str) -> None:
    with pytest.raises(CorruptEngine, match=match):
        open_engine(folder)


def test_an_engine_that_nobody_edited_is_verified(edited: Edited) -> None:
    folder = edited(lambda engine: None)
    found = verify_engine(folder)
    assert found["kernels"] > 20 and found["launches"] > 100 and found["operators"] > 10


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("threads", 0),
        ("threads", 100),
        ("threads", 2048),
        ("threads", 1024),
        ("shared_bytes", -1),
        ("shared_bytes", HOPPER.max_shared_bytes + 1),
        ("shared_bytes", 16),
        ("cluster", 0),
        ("cluster", 8),
        ("num_hidden_arguments", 3),
        ("num_hidden_arguments", 1),
        ("arguments", []),
        ("arguments", ["*fp32"]),
        ("arguments", "evil"),
        ("arguments", [["*i32"]]),
        ("entry", "evil"),
        ("entry", None),
        ("name", "evil"),
        ("registers", 10**6),
        ("more", 1),
    ],
)
def test_launch_metadata_that_no_kernel_has_is_refused(
    edited: Edited, name: str, value: object
) -> None:
    refuse(edited(lambda e: kernel(e, "few")["metadata"].update({name: value})), "kernel")


def test_a_kernel_that_steps_launch_and_is_not_there_is_refused(edited: Edited) -> None:
    def change(engine: HostileEngine) -> None:
        gone = kernel(engine, "paged_attention")
        engine.plan["kernels"].remove(gone)
        name = f"kernel:{gone['name']}"
        begin, end = engine.header.pop(name)["data_offsets"]
        engine.data = engine.data[:begin] + engine.data[end:]
        for entry in engine.header.values():
            if entry["data_offsets"][0] >= end:
                entry["data_offsets"] = [at - (end - begin) for at in entry["data_offsets"]]

    refuse(edited(change), "there is no kernel|its plan says")


def test_a_kernel_of_another_name_is_refused(edited: Edited) -> None:
    def change(engine: HostileEngine) -> None:
        each = kernel(engine, "rms_norm")
        engine.header["kernel:evil"] = engine.header.pop(f"kernel:{each['name']}")
        each["name"] = each["metadata"]["name"] = "evil"

    refuse(edited(change), "there is no kernel 'rms_norm")


def test_a_binary_that_is_none_is_refused(edited: Edited) -> None:
    def change(engine: HostileEngine) -> None:
        begin, end = engine.header[f"kernel:{kernel(engine, 'few')['name']}"]["data_offsets"]
        engine.data = engine.data[:begin] + bytes(end - begin) + engine.data[end:]

    refuse(edited(change), "not a 64-bit ELF file")


@pytest.mark.parametrize(
    "tactic",
    [
        "",
        "*:many;8:n8r1c2s11k1g0f0",
        "8:n8r1c2s11k1g0f0",
        "16:n8r1c2s999k1g0f0;*:many",
        "64:n8r1c1s4k0g0f0;*:many",
        "8:n8r1c2s11k3g0f0;*:many",
        "8:n9r1c2s11k1g0f0;*:many",
        "8:evil;*:many",
        "cpu.linear.fp8",
    ],
)
def test_a_tactic_that_cannot_run_its_weight_is_refused(edited: Edited, tactic: str) -> None:
    refuse(edited(lambda e: e.op(ROPE).update(tactic=tactic)), "tactic|cannot run it|no kernel")


@pytest.mark.parametrize("span", [(-1, 2), (3, 3), (0, 10**6), (0, 2)])
def test_operators_that_no_one_launch_computes_are_refused(
    edited: Edited, span: tuple[int, int]
) -> None:
    def change(engine: HostileEngine) -> None:
        name = kernel(engine, "few")["name"]
        engine.plan["fused"] = [{"start": span[0], "stop": span[1], "kernel": name}]

    refuse(edited(change), "operators")


@pytest.mark.parametrize("capability", ["10.0", "9.0,9.0", "", "evil", "8.9"])
def test_another_generation_than_the_kernels_are_for_is_refused(
    edited: Edited, capability: str
) -> None:
    refuse(edited(lambda e: e.config.update(compute_capability=capability)), ".")


@pytest.mark.parametrize("layer", [-1, -1_000_000, 2, 2**62])
def test_a_layer_outside_the_cache_is_refused(edited: Edited, layer: int) -> None:
    refuse(edited(lambda e: e.op(ROPE)["attributes"].update(layer=layer)), "layer")


def test_a_backend_that_is_not_the_plans_is_refused(edited: Edited) -> None:
    for backend in ("cpu", "tensorrt", "tensorrt-rtx"):
        refuse(edited(lambda e, name=backend: e.config.update(backend=name)), ".")


def test_random_edits_are_refused_by_name_or_launch_the_same(
    engine: HostileEngine, edited: Edited, pytestconfig: pytest.Config
) -> None:
    count = max(1, pytestconfig.getoption("--fuzz-cases") // 20)
    wanted = sum(1 for _ in launch_names(edited(lambda e: None)))
    refused = 0
    for number in range(count):
        rng = random.Random(number)
        edit = (rng.choice(ACTIONS), rng.randrange(1 << 20), rng.randrange(1 << 20))

        def change(e: HostileEngine, rng: random.Random = rng, edit: Any = edit) -> None:
            part = rng.choice(("ops", "kernels", "tensors", "kv_cache", "fused"))
            apply(e.plan[part], (*edit, rng.choice(VALUES)))

        try:
            assert sum(1 for _ in launch_names(edited(change))) == wanted, edit
        except LlmctlError:
            refused += 1
    assert refused > count / 4, "many edits change nothing: most should be refused"


def launch_names(folder: Path) -> Iterator[int]:
    """One for each launch of an engine that opens."""
    plan, stored = open_engine(folder)
    assert all(isinstance(tensor, torch.Tensor) for tensor in stored.values())
    assert plan.max_num_tokens == LIMITS["max_num_tokens"]
    yield from range(check_launches(read_engine_config(folder), plan))
