"""The quantize stage as a whole: bad values, refusals, memory, interruption, the command."""

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
from typer.testing import CliRunner

from llmctl import errors
from llmctl.cli.quantize import parse_size, quantize
from llmctl.quantize import plan as plan_module
from llmctl.quantize.checkpoint import Checkpoint
from llmctl.quantize.layers import ZERO_WEIGHT_SCALE, quantize_weight
from llmctl.quantize.memory import available_memory_bytes
from llmctl.quantize.plan import QuantizeOptions
from llmctl.quantize.quantizer import run_quantization
from llmctl.quantize.writer import ShardWriter

Q_PROJ = "model.layers.0.self_attn.q_proj"
V_PROJ = "model.layers.0.self_attn.v_proj"

# ---- values ----


def test_an_all_zero_weight_stays_exactly_zero(
    editable: Callable[..., Path], plan_tiny: Callable[..., Any], tmp_path: Path
) -> None:
    source = editable(lambda t: (t[Q_PROJ + ".weight"].zero_(), t[V_PROJ + ".weight"].zero_()))
    run_quantization(plan_tiny(source, tmp_path / "out", kv_cache_dtype="fp8"))
    result = Checkpoint.open(tmp_path / "out")
    assert not result.read(Q_PROJ + ".weight").float().any()
    assert result.read(Q_PROJ + ".weight_scale").item() == ZERO_WEIGHT_SCALE
    # V is zero, so what o_proj reads is zero as well: neither scale may be zero.
    assert result.read(V_PROJ + ".v_scale").item() == 1.0
    assert result.read("model.layers.0.self_attn.o_proj.input_scale").item() == 1.0
    for name, info in result.tensors.items():
        values = result.read(name).float()
        assert values.isfinite().all(), name
        assert not name.endswith("_scale") or (info.shape == () and values > 0), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_values_beyond_448_saturate_and_never_become_nan(dtype: torch.dtype) -> None:
    values = torch.tensor([448, 464, 480, 1e4, -448, -500, 0.0, -0.0], dtype=dtype)
    stored = quantize_weight(values, torch.tensor(1.0)).float()
    assert stored.tolist() == [448, 448, 448, 448, -448, -448, 0, 0]


def test_a_rounded_up_quotient_of_the_largest_value_saturates() -> None:
    # amax / (amax / 448) may round above 448 in bfloat16; E4M3 has no infinity to fall into.
    for exponent in range(-20, 20):
        for mantissa in range(128):
            amax = torch.tensor((1 + mantissa / 128) * 2.0**exponent, dtype=torch.bfloat16)
            scale = amax.float() / 448
            stored = quantize_weight(amax.reshape(1), scale)
            assert stored.float().item() == 448


def test_subnormal_weights_stay_finite(
    editable: Callable[..., Path], plan_tiny: Callable[..., Any], tmp_path: Path
) -> None:
    source = editable(lambda t: t[Q_PROJ + ".weight"].fill_(1e-40))
    run_quantization(plan_tiny(source, tmp_path / "out"))
    result = Checkpoint.open(tmp_path / "out")
    assert result.read(Q_PROJ + ".weight_scale").item() > 0
    assert result.read(Q_PROJ + ".weight").float().isfinite().all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    "name", [Q_PROJ + ".weight", "model.embed_tokens.weight", "model.norm.weight"]
)
def test_a_weight_that_is_not_finite_is_refused_by_name(
    editable: Callable[..., Path],
    plan_tiny: Callable[..., Any],
    tmp_path: Path,
    name: str,
    value: float,
) -> None:
    source = editable(lambda t: t[name].view(-1)[3:4].fill_(value))
    with pytest.raises(errors.BadTensorValue, match=name):
        run_quantization(plan_tiny(source, tmp_path / "out"))
    assert not list(tmp_path.glob("*out*"))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_a_weight_stored_in_another_kind_of_number_is_refused(
    editable: Callable[..., Path], plan_tiny: Callable[..., Any], tmp_path: Path, dtype: torch.dtype
) -> None:
    name = Q_PROJ + ".weight"
    source = editable(lambda t: t.__setitem__(name, t[name].to(dtype)))
    with pytest.raises(errors.BadTensorShape, match=f"{name} .* is (I8|F8_E4M3)"):
        run_quantization(plan_tiny(source, tmp_path / "out"))
    assert not list(tmp_path.glob("*out*"))


def test_a_rope_that_computes_nan_is_refused(
    editable: Callable[..., Path], plan_tiny: Callable[..., Any], tmp_path: Path
) -> None:
    source = editable(lambda t: None)
    config = json.loads((source / "config.json").read_text())
    config["rope_parameters"]["factor"] = 0.0
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(errors.BadTensorValue, match="not finite"):
        run_quantization(plan_tiny(source, tmp_path / "out", kv_cache_dtype="fp8"))
    assert not list(tmp_path.glob("*out*"))


def test_activations_that_overflow_are_refused(
    editable: Callable[..., Path], plan_tiny: Callable[..., Any], tmp_path: Path
) -> None:
    source = editable(lambda t: t["model.layers.0.mlp.down_proj.weight"].fill_(3e38))
    with pytest.raises(errors.BadTensorValue, match="layer 0"):
        run_quantization(plan_tiny(source, tmp_path / "out"))


def test_int8_kv_scales_are_measured_as_fp8_ones_are(quantized: Callable[..., Path]) -> None:
    fp8, int8 = (Checkpoint.open(quantized(kv_cache_dtype=name)) for name in ("fp8", "int8"))
    assert int8.quantization is not None and int8.quantization.kv_cache_algo == "INT8"
    for name in fp8.tensors:
        wanted, found = fp8.read(name), int8.read(name)
        if name.endswith(("k_scale", "v_scale")):
            wanted, found = wanted * 448, found * 127  # both are what calibration saw
        torch.testing.assert_close(found.float(), wanted.float(), rtol=1e-6, atol=0)


# ---- refusals before any work ----


def test_a_quantized_source_is_refused_by_name(
    quantized: Callable[..., Path], plan_tiny: Callable[..., Any], tmp_path: Path
) -> None:
    source = quantized("llama", kv_cache_dtype="fp8")
    with pytest.raises(errors.Unsupported, match=r"quantized already \(modelopt, FP8\)"):
        plan_tiny(source, tmp_path / "out")


def test_an_output_that_exists_is_never_touched(
    checkpoints: Callable[..., Path], plan_tiny: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(errors.OutputExists):
        plan_tiny(checkpoints(), tmp_path / "out")


def test_an_output_that_cannot_be_written_is_refused_before_any_work(
    checkpoints: Callable[..., Path], plan_tiny: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(errors.BadConfig, match="is not a folder"):
        plan_tiny(checkpoints(), tmp_path / "file" / "out")


def test_a_checkpoint_without_tokenizer_is_refused(
    editable: Callable[..., Path], plan_tiny: Callable[..., Any], tmp_path: Path
) -> None:
    source = editable(lambda tensors: None)
    (source / "tokenizer.json").unlink()
    with pytest.raises(errors.TokenizerError, match="tokenizer.json"):
        plan_tiny(source, tmp_path / "out")


@pytest.mark.parametrize("qformat", ["fp8", "w4a8_mxfp4_fp8"])
def test_too_little_memory_or_disk_is_said_before_the_start(
    checkpoints: Callable[..., Path],
    plan_tiny: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    qformat: str,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(plan_module, "available_memory_bytes", lambda: 1000)
        with pytest.raises(errors.OutOfMemory, match="GB are available"):
            plan_tiny(checkpoints(), tmp_path / "out", qformat=qformat)
    asked: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(plan_module, "require_space", lambda folder, size: asked.append(size))
        plan = plan_tiny(checkpoints(), tmp_path / "out", qformat=qformat, max_shard_bytes=80_000)
    run_quantization(plan)
    assert asked == [sum(p.stat().st_size for p in (tmp_path / "out").glob("*.safetensors"))]


def test_a_missing_extra_names_the_command_that_installs_it(
    checkpoints: Callable[..., Path],
    plan_tiny: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    find_spec = plan_module.importlib.util.find_spec
    monkeypatch.setattr(
        plan_module.importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "modelopt" else find_spec(name, *rest),
    )
    with pytest.raises(errors.NoDevice, match="needs modelopt") as caught:
        plan_tiny(checkpoints(), tmp_path / "out")
    assert caught.value.fix == "pip install 'llmctl[quantize]'"


def test_a_cuda_device_that_is_absent_is_said_before_the_start(
    checkpoints: Callable[..., Path],
    plan_tiny: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(errors.NoDevice, match="no CUDA device"):
        plan_tiny(checkpoints(), tmp_path / "out", device="cuda")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("calib_size", 0),
        ("calib_max_seq_length", 0),
        ("batch_size", -1),
        ("tp_size", 0),
        ("kv_cache_dtype", "int4"),
        ("dtype", "fp64"),
        ("device", "tpu"),
        ("max_shard_bytes", 0),
    ],
)
def test_an_option_out_of_range_is_a_bad_config(option: str, value: Any) -> None:
    with pytest.raises(errors.BadConfig, match=option):
        QuantizeOptions(Path("a"), Path("b"), **{option: value})


def test_rows_are_no_longer_than_the_model_allows(
    checkpoints: Callable[..., Path], plan_tiny: Callable[..., Any], tmp_path: Path
) -> None:
    plan = plan_tiny(checkpoints(), tmp_path / "out", calib_max_seq_length=10_000)
    assert plan.row_length == 256  # max_position_embeddings


def test_a_tied_head_cannot_be_quantized(
    checkpoints: Callable[..., Path], plan_tiny: Callable[..., Any], tmp_path: Path
) -> None:
    with pytest.raises(errors.Unsupported, match="embedding"):
        plan_tiny(checkpoints("qwen3-tied"), tmp_path / "out", quantize_lm_head=True)


# ---- interruption ----


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


# ---- memory ----


def test_available_memory_is_the_lesser_of_machine_and_control_group(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    8000 kB\n")
    group = tmp_path / "cgroup"
    assert available_memory_bytes(tmp_path / "meminfo", group) == 8_192_000
    group.mkdir()
    (group / "memory.max").write_text("max\n")
    assert available_memory_bytes(tmp_path / "meminfo", group) == 8_192_000
    (group / "memory.max").write_text("3000000\n")
    (group / "memory.current").write_text("2000000\n")
    (group / "memory.stat").write_text("active_file 1\ninactive_file 500000\n")
    assert available_memory_bytes(tmp_path / "meminfo", group) == 1_500_000


MEMORY_SCRIPT = """
import json, resource, sys
from pathlib import Path
from llmctl.quantize.plan import QuantizeOptions, plan_quantization
from llmctl.quantize.quantizer import run_quantization

for source in sys.argv[1:]:
    options = QuantizeOptions(
        Path(source), Path(source + "-out"), calib_size=2, calib_max_seq_length=32, device="cpu"
    )
    print(run_quantization(plan_quantization(options)).peak_memory_bytes)
"""


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
    checkpoints: Callable[..., Path], tmp_path: Path
) -> None:
    layer_bytes = write_wide_model(tmp_path / "short", checkpoints(), 2)
    write_wide_model(tmp_path / "deep", checkpoints(), 14)
    command = [sys.executable, "-c", MEMORY_SCRIPT, str(tmp_path / "short"), str(tmp_path / "deep")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    short, deep = map(int, done.stdout.split())
    # Twelve more layers, 226 MB of bfloat16: fewer than two of them may be resident more.
    assert deep - short < 2 * layer_bytes


# ---- the command ----

COMMAND_APP = typer.Typer()
COMMAND_APP.command("quantize")(quantize)


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
