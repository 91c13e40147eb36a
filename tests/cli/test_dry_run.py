"""`llmctl build --dry-run`: the memory of an engine on a GPU that need not be there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmctl.builder.engine_format import engine_bytes, read_plan
from llmctl.cli.build import dry_run
from llmctl.cli.gpus import GB, GPUS, Gpu
from llmctl.errors import BadConfig, Unsupported
from llmctl.runtime.engines.memory_plan import RESERVED_BYTES, EngineMemory, plan_device

PARTS = ("weight_bytes", "activation_bytes", "scratch_bytes", "graph_bytes", "reserved_bytes")


@pytest.fixture
def planned(llmctl, engines):
    """The plan of the target checkpoint as an object."""

    def plan(*options: object) -> dict:
        done = llmctl(
            *("build", "--checkpoint-dir", engines.target_checkpoint, "--max-seq-len", 512),
            *("--max-num-tokens", 128, "--dry-run", "--json", "--log-level", "error", *options),
        )
        assert done.code in (0, 3) and done.err == ""
        return json.loads(done.out)

    return plan


def test_a_gpu_s_plan_is_the_one_that_run_makes_before_loading(planned):
    found = planned("--gpu", "h200")["memory"]
    memory = EngineMemory(
        role="target",
        **{name: found[name] for name in PARTS[:-1]},
        kv_bytes_per_block=32 * found["kv_bytes_per_token"],
        tokens_per_block=32,
        max_batch_size=1_000_000,
        max_seq_len=512,
    )
    here = GPUS["h200"].memory_bytes
    plan = plan_device([memory], free_bytes=here, total_bytes=here)
    assert found["reserved_bytes"] == RESERVED_BYTES
    assert found["max_kv_tokens"] == 32 * plan.kv_cache.num_blocks
    assert found["total_bytes"] == plan.total_bytes


def test_the_table_holds_what_fits_and_nothing_else(planned):
    found = planned("--gpu-memory", 0.7, "--backend", "cuda")["memory"]
    grid = found["table"]
    fixed = sum(found[name] for name in PARTS)
    assert grid["lengths"] == [512]
    for length, row, most in zip(
        grid["lengths"], grid["bytes"], grid["most_sequences"], strict=True
    ):
        sequence = length * found["kv_bytes_per_token"]
        assert most * sequence <= found["kv_limit_bytes"] < (most + 1) * sequence
        for batch, num in zip(grid["batch_sizes"], row, strict=True):
            assert num == (fixed + batch * sequence if batch <= most else None)
            assert num is None or num <= found["free_bytes"]
    assert any(num is None for row in grid["bytes"] for num in row)


def test_an_engine_that_does_not_fit_exits_with_3(llmctl, engines):
    line = (
        "build",
        "--checkpoint-dir",
        engines.target_checkpoint,
        "--dry-run",
        "--backend",
        "cuda",
    )
    done = llmctl(*line, "--gpu-memory", 0.3)
    assert done.code == 3 and "does not fit in 300 MB" in done.out
    found = json.loads(llmctl(*line, "--gpu-memory", 0.3, "--json").out)["memory"]
    assert found["fits"] is False and found["max_kv_tokens"] == 0


def test_disk_is_what_the_engine_file_and_its_tokenizer_take(planned, engines, tmp_path):
    disk = planned("--output-dir", tmp_path / "new" / "engine")["memory"]["disk"]
    assert disk["folder"] == str(tmp_path) and disk["fits"]
    plan = read_plan(engines.draft)  # of the same shape and limits
    tokenizer = sum(p.stat().st_size for p in (engines.draft / "tokenizer").iterdir())
    assert disk["needed_bytes"] == pytest.approx(engine_bytes(plan) + tokenizer, rel=0.01)


def test_the_cpu_s_plan_is_of_this_machine(planned):
    found = planned()["memory"]
    assert found["memory"] == "this machine" and found["scratch_bytes"] == 0
    assert 0 < found["free_bytes"] < found["total_bytes"]


@pytest.mark.parametrize(
    "gpu, backend", [("h100", "cuda"), ("rtx-4090", "tensorrt-rtx"), ("l40s", "tensorrt-rtx")]
)
def test_auto_plans_for_what_runs_on_the_gpu_named(gpu, backend):
    assert dry_run.backend_for("auto", gpu) == backend
    assert dry_run.backend_for("cpu", None) == "cpu"


def test_a_gpu_that_the_backend_does_not_serve_is_refused():
    with pytest.raises(Unsupported, match=r"8\.9; cuda engines are for 9\.0"):
        dry_run.backend_for("cuda", "rtx-4090")
    for backend in ("auto", "cuda"):  # of Hopper, but smaller than its kernels need
        with pytest.raises(
            Unsupported, match="h100-pcie has 114 multiprocessors; cuda .* need 132"
        ):
            dry_run.backend_for(backend, "h100-pcie")
    with pytest.raises(Unsupported, match="none of cuda, tensorrt-rtx serves"):
        dry_run.backend_for("auto", "b200")


def test_gpus_are_refused_where_they_mean_nothing(llmctl, engines):
    line = ("build", "--checkpoint-dir", engines.target_checkpoint)
    assert "are for --dry-run" in llmctl(*line, "--gpu", "h200").err
    with pytest.raises(BadConfig, match="no effect on cpu"):
        dry_run.choose_memory("cpu", None, 80.0)


def test_the_gpu_of_this_machine_is_planned_with_what_it_has_free(monkeypatch):
    here = Gpu("h200", "9.0", 150 * GB, 4.8e12)
    monkeypatch.setattr(dry_run, "present_gpu", lambda: here)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (120 * GB, 150 * GB))
    assert dry_run.choose_memory("cuda", None, None).free_bytes == 120 * GB
    assert dry_run.choose_memory("cuda", "h100", None).free_bytes == 80 * GB
    monkeypatch.setattr(dry_run, "present_gpu", lambda: None)
    assert dry_run.choose_memory("cuda", None, None).name == "h200"


def test_people_get_a_table_with_units(llmctl, engines, tmp_path: Path):
    line = ("build", "--checkpoint-dir", engines.target_checkpoint, "--dry-run", "--gpu", "h100")
    done = llmctl(*line, "--max-seq-len", 4096)
    lines = [" ".join(row.split()) for row in done.out.splitlines()]
    assert done.code == 0
    assert "h100: 80 GB free of 80 GB" in lines
    assert any(row.startswith("KV cache") and "90 % of the rest" in row for row in lines)
    (head,) = [i for i, row in enumerate(lines) if row.startswith("tokens batch 1 batch 2")]
    lengths = [row.split()[0] for row in lines[head + 1 : head + 5]]
    assert lengths == ["512", "1,024", "2,048", "4,096"]
