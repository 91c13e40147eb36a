"""`llmctl inspect` tells what an engine directory holds, for people and for scripts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmctl.builder.build import plan_build
from llmctl.builder.config import BuildRequest
from llmctl.builder.engine_format import open_engine, read_engine_config
from llmctl.builder.generated import LoadFormat
from llmctl.cli.inspect.engine import _layers
from llmctl.runtime.engine import kv_bytes_per_block


@pytest.fixture
def described(llmctl, engines):
    """The JSON object about the target engine."""
    done = llmctl("inspect", engines.target, "--json")
    assert (done.code, done.err) == (0, "")
    return json.loads(done.out)


def test_json_holds_the_engine_s_own_config(described, engines):
    stored = json.loads((engines.target / "config.json").read_text())
    del stored["files"]
    assert described["config"] == stored
    assert described["config"]["command"].startswith("llmctl")


def test_memory_is_that_of_the_weights_and_the_cache(described, engines):
    plan, tensors = open_engine(engines.target)
    memory = described["memory"]
    assert memory["weight_bytes"] == sum(t.numel() * t.element_size() for t in tensors.values())
    assert memory["activation_bytes"] == plan.arena_bytes
    assert memory["kv_bytes_per_block"] == kv_bytes_per_block(plan)
    assert memory["kv_bytes_per_sequence"] == 512 * memory["kv_bytes_per_token"]
    assert memory["kernel_bytes"] == memory["scratch_bytes"] == 0 and described["kernels"] == []


def test_files_are_all_those_on_disk(described, engines):
    sizes = {file["name"]: file["bytes"] for file in described["files"]}
    record = read_engine_config(engines.target).files
    assert sizes["rank0.engine"] == record["rank0.engine"]["bytes"]
    assert {"config.json", "tokenizer/tokenizer.json"} < set(sizes)
    assert sizes["config.json"] == (engines.target / "config.json").stat().st_size


def test_every_operator_belongs_to_one_group(described, engines):
    plan, _ = open_engine(engines.target)
    counted = sum(max(len(g["layers"]), 1) * len(g["ops"]) for g in described["layers"])
    assert counted == len(plan.ops)
    outside = [op["op"] for g in described["layers"] if not g["layers"] for op in g["ops"]]
    assert outside == ["embedding", "rms_norm", "linear"]
    (head,) = [op for g in described["layers"] for op in g["ops"] if op["name"] == "lm_head"]
    assert head["tactic"] == "cpu.linear.bf16"
    assert head["inputs"]["x"] == {
        "kind": "activation",
        "dtype": "bfloat16",
        "shape": ["rows", 256],
    }
    assert head["inputs"]["weight"]["shape"] == [4096, 256]
    assert head["outputs"]["out"]["shape"] == ["rows", 4096]
    assert head["weight_bytes"] == 2 * 4096 * 256


def test_layers_that_are_alike_are_shown_once(engines, tmp_path, monkeypatch):
    monkeypatch.setattr("llmctl.builder.binaries.compile_kernels", lambda *_: [])
    config = json.loads((engines.target_checkpoint / "config.json").read_text())
    config["tie_word_embeddings"] = False
    assert _groups(tmp_path, config, 6) == [[], [0], [1, 2, 3, 4], [5], []]
    assert _groups(tmp_path, config, 1) == [[], [0], []]


def _groups(folder: Path, config: dict[str, Any], count: int) -> list[list[int]]:
    """Layers of each group of an engine of `count` layers."""
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": count}))
    engine = plan_build(
        folder, BuildRequest(max_seq_len=64), backend="cuda", load_format=LoadFormat("dummy")
    )
    return [group["layers"] for group in _layers(engine.plan)]


def test_the_table_names_what_matters(llmctl, engines):
    done = llmctl("inspect", engines.target)
    assert (done.code, done.err) == (0, "")
    lines = [" ".join(line.split()) for line in done.out.splitlines()]
    assert lines[0] == str(engines.target)
    assert "model LlamaForCausalLM, 2 layers, hidden 256, vocabulary 4096" in lines
    assert "backend cpu, bfloat16" in lines
    assert "quantization weights none, KV cache bfloat16" in lines
    assert "KV cache 1024 bytes a token, 524 kB a sequence of 512" in lines
    assert f"source {engines.target_checkpoint}" in lines
    head = "linear 2.1 MB x:bf16[rows,256] weight:bf16[4096,256] -> out:fp32[rows,4096]"
    assert f"{head} cpu.linear.bf16" in lines
    assert any(line.startswith("rank0.engine ") for line in lines)


def test_the_command_is_listed_and_names_its_argument(llmctl):
    assert "inspect" in llmctl("--help").out
    assert "ENGINE_DIR" in llmctl("inspect", "--help").out


def test_a_checkpoint_folder_is_refused_by_name(llmctl, engines):
    done = llmctl("inspect", engines.target_checkpoint)
    assert done.code == 2 and done.out == ""
    assert "error[Unsupported]" in done.err and "is a checkpoint" in done.err


def test_a_folder_that_is_no_engine_is_refused(llmctl, tmp_path):
    for path in (tmp_path, tmp_path / "absent"):
        done = llmctl("inspect", path, "--json")
        assert done.code == 1
        assert json.loads(done.out)["error"]["name"] == "EngineNotFound"


def test_a_truncated_engine_is_refused(llmctl, engines, tmp_path):
    for name in ("config.json", "rank0.engine"):
        (tmp_path / name).write_bytes((engines.draft / name).read_bytes())
    with (tmp_path / "rank0.engine").open("r+b") as file:
        file.truncate(file.seek(0, 2) - 1)
    done = llmctl("inspect", tmp_path)
    assert done.code == 1 and "error[CorruptEngine]" in done.err
