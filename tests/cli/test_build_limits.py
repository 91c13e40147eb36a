"""What `build` says of the default limits: which larger ones the GPU's memory allows."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from llmctl.builder.build import plan_build
from llmctl.builder.config import BuildRequest
from llmctl.builder.engine_plan import EnginePlan
from llmctl.builder.planted import LoadFormat
from llmctl.cli.build.dry_run import Memory, plan_memory
from llmctl.cli.build.limits import advise_limits, limits_note
from llmctl.cli.gpus import GB, GPUS
from scripts.models.make_planted_checkpoints import Recipe, write_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config of an 8B model in FP8."""
    path = tmp_path_factory.mktemp("planned") / "8b"
    write_checkpoint(path, Recipe("8b", "target", 0.8, 1, "fp8"), config_only=True)
    return path


@pytest.fixture
def plan(folder: Path) -> partial[EnginePlan]:
    load_format = LoadFormat("planted")
    return partial(plan_build, folder, backend="cuda", load_format=load_format, with_binaries=False)


def memory(num_gb: float) -> Memory:
    num_bytes = int(num_gb * GB)
    return Memory("h100", num_bytes, num_bytes, replace(GPUS["h100"], memory_bytes=num_bytes))


@pytest.mark.parametrize(
    ("num_gb", "limits"),
    [(140, (256, 8448)), (80, (256, 8448)), (40, (128, 8320)), (13, (16, 2064)), (11, None)],
)
def test_the_most_that_the_memory_holds_is_advised(plan, num_gb, limits) -> None:
    request = BuildRequest(max_seq_len=4096)
    engine = plan(request)
    note = limits_note(engine, memory(num_gb), plan, request)
    if limits is None:
        assert note is None
        return
    assert note is not None and note.startswith("8 requests run together, with 2048 tokens a step")
    assert "--max-batch-size {} --max-num-tokens {} ".format(*limits) in note
    # what is advised fits, with so many sequences of 2,048 tokens
    larger = plan(replace(request, max_batch_size=limits[0], max_num_tokens=limits[1]))
    found = plan_memory(larger, memory(num_gb), Path())
    assert found["fits"] and found["max_kv_tokens"] >= 2048 * limits[0]


@pytest.mark.parametrize(
    ("given", "request_fields", "is_told"),
    [
        ({}, {}, True),
        ({"max_batch_size": 8}, {}, False),
        ({"max_num_tokens": 2048}, {}, False),
        ({"max_batch_size": None, "max_num_tokens": None}, {}, True),
        ({}, {"max_batch_size": 16}, False),  # in --build-config
    ],
)
def test_who_chose_a_limit_is_told_nothing(plan, given, request_fields, is_told) -> None:
    request = BuildRequest(max_seq_len=4096, **request_fields)
    notes = advise_limits(plan(request), plan, request, given)
    assert len(notes) == is_told
    assert all("h200 has room for 256 of 2048 tokens" in note for note in notes)


def test_cpu_engines_and_dry_runs_are_told_nothing(llmctl, engines, folder, tmp_path) -> None:
    options: list[Any] = ["--output-dir", tmp_path / "e", "--max-seq-len", 64]
    done = llmctl("build", "--checkpoint-dir", engines.target_checkpoint, "--backend", "cpu",
                  *options)  # fmt: skip
    assert done.code == 0 and "requests run together" not in done.err
    done = llmctl("build", "--checkpoint-dir", folder, "--backend", "cuda", "--load-format",
                  "planted", "--dry-run", "--gpu", "h100", "--json", *options)  # fmt: skip
    assert done.code == 0 and "requests run together" not in done.err
    assert json.loads(done.out)["max_batch_size"] == 8
