"""Quantize as a program: interruption, memory, its command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from support.forked_program import ForkedProgram
from typer.testing import CliRunner

from llmctl import errors
from llmctl.cli.quantize import parse_size, quantize
from llmctl.quantize.checkpoint import Checkpoint
from llmctl.quantize.quantizer import run_quantization
from llmctl.quantize.writer import ShardWriter


@pytest.mark.parametrize("call", [1, 2, 20, 49])
def test_ctrl_c_between_any_two_writes_leaves_nothing(
    checkpoints: Callable[..., Path],
    plan_tiny: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    call: int,
) -> None:
    calls = 0
    write = ShardWriter.write

    def interrupted(self: ShardWriter, name: str, tensor: torch.Tensor) -> None:
        nonlocal calls
        calls += 1
        if calls == call:
            raise KeyboardInterrupt
        write(self, name, tensor)

    plan = plan_tiny(checkpoints(), tmp_path / "out", max_shard_bytes=60_000)
    open_files = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(ShardWriter, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_quantization(plan)
    assert not list(tmp_path.iterdir())
    assert len(os.listdir("/proc/self/fd")) <= open_files + 1  # the source's own map


def test_two_runs_into_one_folder_leave_one_whole_result(
    checkpoints: Callable[..., Path], plan_tiny: Callable[..., Any], tmp_path: Path
) -> None:
    first = plan_tiny(checkpoints(), tmp_path / "out")
    second = plan_tiny(checkpoints(), tmp_path / "out")
    run_quantization(second)
    with pytest.raises(errors.OutputExists):
        run_quantization(first)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert len(Checkpoint.open(tmp_path / "out").tensors) == second.num_tensors


def write_wide_model(folder: Path, small: Path, num_layers: int) -> int:
    """A Llama of width 768 whose layers repeat the same random weights; bytes of one layer."""
    from llmctl.quantize.writer import TensorPlan, plan_shards

    config = json.loads((small / "config.json").read_text())
    config |= {"num_hidden_layers": num_layers, "hidden_size": 768, "intermediate_size": 3072}
    config |= {"head_dim": 64, "num_attention_heads": 12, "num_key_value_heads": 12}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_bytes((small / "tokenizer.json").read_bytes())
    shapes = {f"self_attn.{p}_proj.weight": (768, 768) for p in "qkvo"}
    shapes |= {f"mlp.{p}_proj.weight": (3072, 768) for p in ("gate", "up")}
    shapes |= {"mlp.down_proj.weight": (768, 3072)}
    shapes |= dict.fromkeys(("input_layernorm.weight", "post_attention_layernorm.weight"), (768,))
    layer = {name: torch.randn(shape).mul(0.02).bfloat16() for name, shape in shapes.items()}
    tensors = {f"model.layers.{i}.{n}": t for i in range(num_layers) for n, t in layer.items()}
    tensors |= {n: torch.ones(384, 768).bfloat16() for n in ("model.embed_tokens.weight",)}
    tensors |= {"lm_head.weight": tensors["model.embed_tokens.weight"]}
    tensors |= {"model.norm.weight": torch.ones(768).bfloat16()}
    plans = [TensorPlan(name, "BF16", tuple(t.shape)) for name, t in tensors.items()]
    with ShardWriter(folder, plan_shards(plans, 1 << 40)) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
    return sum(t.numel() * 2 for t in layer.values())


def test_peak_memory_grows_with_a_layer_and_not_with_the_model(
    checkpoints: Callable[..., Path], tmp_path: Path, forked_program: ForkedProgram
) -> None:
    layer_bytes = write_wide_model(tmp_path / "short", checkpoints(), 2)
    write_wide_model(tmp_path / "deep", checkpoints(), 10)

    def peak_bytes(name: str) -> int:
        """Of a process that begins with all imports done."""
        options = ["--calib-size", "2", "--calib-max-seq-length", "32", "--device", "cpu", "--json"]
        folder, output = str(tmp_path / name), str(tmp_path / f"{name}-out")
        command = [*forked_program.command, "quantize", "--model-dir", folder]
        command += ["--output-dir", output, *options]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return int(json.loads(done.stdout)["peak_memory_bytes"])

    short, deep = peak_bytes("short"), peak_bytes("deep")
    print(
        f"peak memory {short / 1e6:.0f} and {deep / 1e6:.0f} MB, layers of {layer_bytes / 1e6:.0f}"
    )
    # Eight more layers, 150 MB of bfloat16: fewer than three of them may be resident more. What
    # a layer leaves behind differs from run to run by up to 17 MB, one layer.
    assert deep - short < 3 * layer_bytes


def make_app() -> typer.Typer:
    app = typer.Typer()
    app.command("quantize")(quantize)
    return app


COMMAND_APP = make_app()


def arguments(source: Path, output: Path, *more: str) -> list[str]:
    sizes = ["--calib-size", "2", "--calib-max-seq-length", "16", "--device", "cpu"]
    return ["--model-dir", str(source), "--output-dir", str(output), *sizes, *more]


def test_the_command_prints_one_json_line_and_states_memory_first(
    checkpoints: Callable[..., Path], tmp_path: Path
) -> None:
    options = ["--json", "--kv-cache-dtype", "fp8", "--tp-size", "2", "--max-shard-size", "1MB"]
    args = arguments(checkpoints(), tmp_path / "out", *options)
    result = CliRunner().invoke(COMMAND_APP, args, catch_exceptions=False)
    assert result.exit_code == 0
    (line,) = result.stdout.splitlines()
    found = json.loads(line)
    written = Checkpoint.open(tmp_path / "out")
    assert found["num_tensors"] == len(written.tensors)
    assert found["scheme"] == "fp8" and found["kv_cache_dtype"] == "fp8"
    assert found["output_bytes"] == (tmp_path / "out" / "model.safetensors").stat().st_size
    assert found["peak_memory_bytes"] > 10_000_000 and found["seconds_s"] > 0
    before, _, after = result.stderr.partition("layers")
    assert "needs about" in before and "of memory" in before and "2/2" in after
    record = json.loads((tmp_path / "out" / "llmctl_quantize.json").read_text())
    assert record["quantize"]["tp_size"] == 2


def test_tokenizer_and_config_are_copied_verbatim(
    checkpoints: Callable[..., Path], quantized: Callable[..., Path]
) -> None:
    source, output = checkpoints("llama"), quantized("llama", kv_cache_dtype="fp8")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (output / name).read_bytes() == (source / name).read_bytes()
    config = json.loads((output / "config.json").read_text())
    del config["quantization_config"]
    assert list(config.items()) == list(json.loads((source / "config.json").read_text()).items())


def test_a_layout_other_than_hf_is_refused(tmp_path: Path) -> None:
    args = arguments(tmp_path, tmp_path / "out", "--export-format", "tensorrt_llm")
    result = CliRunner().invoke(COMMAND_APP, args)
    assert isinstance(result.exception, errors.Unsupported)


@pytest.mark.parametrize(
    ("text", "size"), [("5GB", 5_000_000_000), ("500 mb", 500_000_000), ("0.5KB", 500), ("7", 7)]
)
def test_shard_sizes_are_read(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "0", "5TB", "1e9"])
def test_other_shard_sizes_are_refused(text: str) -> None:
    with pytest.raises(errors.BadConfig, match="max-shard-size"):
        parse_size(text)


def test_the_command_module_imports_nothing_heavy() -> None:
    script = textwrap.dedent(
        """
        import sys
        import llmctl.cli.quantize
        heavy = {"torch", "transformers", "modelopt", "numpy", "tokenizers"} & set(sys.modules)
        assert not heavy, heavy
        """
    )
    subprocess.run([sys.executable, "-c", script], check=True)
