"""`llmctl inspect` tells what an engine directory holds, for people and for scripts."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from llmctl.builder.build import plan_build
from llmctl.builder.config import BuildRequest
from llmctl.builder.engine_format import open_engine, read_engine_config
from llmctl.builder.engine_kernels import meta_cache, meta_step, plan_chains
from llmctl.builder.engine_plan import EnginePlan
from llmctl.builder.meta_calls import without_memory
from llmctl.builder.planted import LoadFormat
from llmctl.builder.step_limits import step_limits
from llmctl.cli.build.dry_run import choose_memory, plan_memory
from llmctl.cli.build.dry_run_text import engine_lines
from llmctl.cli.inspect.cost import Step, step_bytes
from llmctl.cli.inspect.engine import describe_layers
from llmctl.cli.inspect.prediction import predict_step
from llmctl.plugins.backends.cuda.kernel_spec import LaunchEnv, StepShape
from llmctl.plugins.fused.decoder_layers.kernel import chain_launch
from llmctl.runtime.engines.engine import kv_bytes_per_block
from scripts.bench.plan_support import write_config
from scripts.models.planted_shapes import SHAPES


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
    (table,) = described["rotary_tables"]
    assert (table["positions"], table["head_size"], table["factor"]) == (512, 64, 1.0)
    stored = sum(t.numel() * t.element_size() for t in tensors.values())
    assert memory["weight_bytes"] == stored + table["bytes"] == stored + 512 * 64 * 4
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
    return [group["layers"] for group in describe_layers(engine.plan)]


def plan_8b(folder: Path, qformat: str) -> EnginePlan:
    """A cuda engine of Llama 3.1 8B's shape, of config.json alone, with an unquantized head."""
    write_config(folder, SHAPES["8b"], "FP8", qformat=qformat)
    return plan_build(
        folder,
        BuildRequest(max_batch_size=1, max_seq_len=4096, max_num_tokens=2048),
        backend="cuda",
        compute_capability="9.0",
        load_format=LoadFormat("dummy"),
        with_binaries=False,
    )


def test_a_step_of_four_bit_weights_reads_four_bits_and_their_powers(tmp_path, h200_rows):
    """4.25 bits a number, 0.25 of them a byte for 32; the rest is what an FP8 model reads."""
    fp8, mxfp4 = (plan_8b(tmp_path, name) for name in ("fp8", "w4a8_mxfp4_fp8"))
    step = Step(1, 1000)
    layer = (6144 + 4096 + 2 * 14336) * 4096 + 4096 * 14336  # q, k, v; o; gate, up; down
    saved = 32 * layer * (1 - 17 / 32)
    # But for activations: products of FP8 weights take norms in.
    found = step_bytes(fp8.plan, step) - step_bytes(mxfp4.plan, step)
    assert found == pytest.approx(saved, rel=1e-4)
    predicted = predict_step(mxfp4.config, mxfp4.plan, step, "h200", None)
    read = predicted["read_bytes"]
    assert read == step_bytes(mxfp4.plan, step) == pytest.approx(4.83e9, rel=1e-3)
    assert predicted["predicted_ms"] == pytest.approx(h200_rows["decode-8b-mxfp4"], rel=1e-2)
    measured = predict_step(fp8.config, fp8.plan, step, "h200", None)
    assert measured["predicted_ms"] == pytest.approx(h200_rows["decode-8b"], rel=1e-2)
    ops = [op for group in describe_layers(mxfp4.plan, step) for op in group["ops"]]
    (down, *_) = [op for op in ops if op["name"].endswith("down_proj")]
    assert down["weight_bytes"] == 4096 * 14336 * 17 // 32 + 4 * 4096 + 4


def one_launch_bytes(engine: EnginePlan) -> int:
    """What binaries that compute all layers in one launch keep between their launches."""
    limits, sizes = step_limits(engine.plan, engine.limits.to_dict()), {}

    def scratch(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        sizes[name] = math.prod(shape) * dtype.itemsize
        return without_memory(shape, dtype)

    cache = meta_cache(engine.plan, limits)
    env = LaunchEnv(meta_step(limits), cache, limits, "tokens", scratch)
    for chain in plan_chains(engine.plan, limits):
        chain_launch(chain, env, StepShape(chain.tokens, 1, 1, chain.tokens, chain.tokens))
    return sum(sizes.values())


def test_the_memory_plan_counts_four_bits_and_what_prompts_expand_them_to(tmp_path):
    plans = [plan_8b(tmp_path, name) for name in ("fp8", "w4a8_mxfp4_fp8")]
    memory = choose_memory("cuda", "h200", None)
    fp8, mxfp4 = (plan_memory(plan, memory, tmp_path / "engine") for plan in plans)
    layer = (6144 + 4096 + 2 * 14336) * 4096 + 4096 * 14336
    assert mxfp4["weight_bytes"] - fp8["weight_bytes"] == -32 * layer * 15 // 32
    # A layer's four weights in FP8; and the models have other binaries of the one launch.
    own = one_launch_bytes(plans[1]) - one_launch_bytes(plans[0])
    assert mxfp4["scratch_bytes"] - fp8["scratch_bytes"] == layer + own
    assert mxfp4["graph_bytes"] == fp8["graph_bytes"]  # one request: no step in a graph expands
    summary = plans[1].summary()["weight_bytes"]  # without the gaps that align tensors
    assert summary == pytest.approx(mxfp4["weight_bytes"], rel=1e-4)
    shown = list(engine_lines(plans[1].summary()))
    assert any("weights W4A8_MXFP4_FP8, KV cache FP8" in line for line in shown)


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
    head = "linear 2.1 MB 2.1 MB - lm_head x:bf16[rows,256] -> out:fp32[rows,4096]"
    assert f"{head} cpu.linear.bf16" in lines
    assert any("embedding token ids -> out:bf16[tokens,256]" in line for line in lines)
    assert any(line.startswith("rank0.engine ") for line in lines)


def test_what_a_stranger_wrote_stays_in_its_row(llmctl, engines, tmp_path):
    """Or it could show a signature, or have a terminal hide lines."""
    shutil.copytree(engines.target, tmp_path / "engine")
    path = tmp_path / "engine/config.json"
    command = "llmctl\n  signature       valid\x1b[8m"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"command": command}))
    rows = [line.split(maxsplit=1) for line in llmctl("inspect", path.parent).out.splitlines()]
    assert ["command", r"llmctl\n  signature       valid\x1b[8m"] in rows
    assert [row[1] for row in rows if row[:1] == ["signature"]] == ["none (unsigned)"]


def test_the_command_is_listed_and_names_its_argument(llmctl):
    assert "inspect" in llmctl("--help").out
    assert "DIR" in llmctl("inspect", "--help").out


def test_a_folder_that_is_no_engine_is_refused(llmctl, tmp_path):
    for path in (tmp_path, tmp_path / "absent"):
        done = llmctl("inspect", path, "--json")
        assert done.code == 1
        assert json.loads(done.out)["error"]["name"] == "EngineNotFound"


def test_a_step_reads_each_weight_once_and_of_tables_one_row(described, engines, llmctl):
    plan, tensors = open_engine(engines.target)
    step = described["step"]
    assert (step["tokens"], step["context_len"]) == (1, 512)  # no more fit the engine
    total = sum(
        max(len(g["layers"]), 1) * op["read_bytes"] for g in described["layers"] for op in g["ops"]
    )
    assert step["read_bytes"] == total
    ops = [op for group in described["layers"] for op in group["ops"]]
    (embedding,) = [op for op in ops if op["op"] == "embedding"]
    assert embedding["read_bytes"] == 2 * 256 and embedding["weight_bytes"] == 2 * 4096 * 256
    attention = next(op for op in ops if op["op"] == "paged_attention")
    head = plan.kv_cache.num_kv_heads * plan.kv_cache.head_size
    assert attention["read_bytes"] == 2 * head * 2 * 512 + 2 * 256  # K and V, then the query
    wide = json.loads(llmctl("inspect", engines.target, "--tokens", 5, "--json").out)
    table = next(op for g in wide["layers"] for op in g["ops"] if op["op"] == "embedding")
    assert table["read_bytes"] == 5 * embedding["read_bytes"]


def test_operators_say_what_they_fuse_and_whose_output_they_read(described):
    (layer,) = [group["ops"] for group in described["layers"] if group["layers"] == [1]]
    does = {op["name"].rpartition(".")[2]: op["fuses"] for op in layer}
    assert does["qkv_proj"] == ["q_proj", "k_proj", "v_proj"]
    assert does["gate_up_proj"] == ["gate_proj", "up_proj"]
    assert does["input_layernorm"] == ["add", "rms_norm"]
    first = layer[0]["producers"]
    assert first["x"] == "model.layers.N-1.mlp.down_proj"
    assert first["residual"] == "model.layers.N-1.post_attention_layernorm"


def test_predictions_are_bytes_over_the_measured_share_of_the_bandwidth(described, engines, llmctl):
    assert described["step"]["predicted_ms"] is None  # nothing is known of this machine's memory
    given = json.loads(llmctl("inspect", engines.target, "--read-bandwidth", 20, "--json").out)
    step = given["step"]
    assert step["read_bytes_s"] == pytest.approx(20e9 * 0.83)
    assert step["predicted_ms"] == pytest.approx(1e3 * step["read_bytes"] / step["read_bytes_s"])
    parts = [
        max(len(g["layers"]), 1) * op["predicted_us"] for g in given["layers"] for op in g["ops"]
    ]
    assert sum(parts) == pytest.approx(1e3 * step["predicted_ms"])
    refused = llmctl("inspect", engines.target, "--gpu", "h200")
    assert refused.code == 2 and "--read-bandwidth" in refused.err


@pytest.mark.parametrize("name", ["graph.html", "graph.dot"])
def test_the_graph_shows_every_operator_and_needs_nothing_else(
    described, engines, llmctl, tmp_path, name
):
    path = tmp_path / name
    assert llmctl("inspect", engines.target, "--graph", path).code == 0
    text = path.read_text()
    for group in described["layers"]:
        for op in group["ops"]:
            assert op["op"] in text
    joiner = " + " if name.endswith("dot") else '</span><span class="chip">'
    assert joiner.join(["gate_proj", "up_proj"]) in text
    drawn = text.count(" -> ") if name.endswith("dot") else text.count('marker-end="url(#end)"><t')
    assert drawn == sum(
        len(op["producers"]) for group in described["layers"] for op in group["ops"]
    )
    assert "http" not in text and "<script" not in text


def test_a_graph_of_another_kind_is_refused(llmctl, engines, tmp_path):
    assert llmctl("inspect", engines.target, "--graph", tmp_path / "graph.pdf").code == 2
    done = llmctl("inspect", engines.target_checkpoint, "--graph", tmp_path / "graph.dot")
    assert done.code == 2 and "is a checkpoint" in done.err


def test_a_truncated_engine_is_refused(llmctl, engines, tmp_path):
    for name in ("config.json", "rank0.engine"):
        (tmp_path / name).write_bytes((engines.draft / name).read_bytes())
    with (tmp_path / "rank0.engine").open("r+b") as file:
        file.truncate(file.seek(0, 2) - 1)
    done = llmctl("inspect", tmp_path)
    assert done.code == 1 and "error[CorruptEngine]" in done.err
