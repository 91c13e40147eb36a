"""`llmctl build --backend tensorrt-rtx` and what `llmctl inspect` shows of the engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support.stand_ins import one_of_each_kind, stand_in_kernels
from support.tensorrt.checkpoints import write_checkpoint

from llmctl.builder.engine_format import TENSORRT_OP, open_engine, read_engine_config
from llmctl.cli.main import execute

LIMITS = (
    *("--max_batch_size", "4", "--max_seq_len", "96", "--max_num_tokens", "64"),
    *("--max_draft_len", "4", "--log_level", "error"),
)


@pytest.fixture(scope="module")
def engine(tmp_path_factory) -> Path:
    """An FP8 engine in pieces, with our kernels between them."""
    folder = tmp_path_factory.mktemp("engine")
    checkpoint = write_checkpoint(folder / "checkpoint", "llama", "fp8")
    output = folder / "engine"
    arguments = ["build", "--backend", "tensorrt-rtx", "--compute-capability", "8.9", *LIMITS]
    where = ("--checkpoint_dir", str(checkpoint), "--output_dir", str(output))
    with one_of_each_kind():
        assert execute([*arguments, *where, "--gemm_plugin", "auto"]) == 0
    return output


def test_the_engine_holds_weights_kernels_and_plans(engine: Path) -> None:
    plan, tensors = open_engine(engine)
    assert [piece.name for piece in plan.trt_pieces] == ["first", "middle", "last"]
    for piece in plan.trt_pieces:
        assert tensors[piece.tensor].numel() == piece.num_bytes > 10_000
        assert piece.package == "tensorrt_rtx"
    assert {kernel.name.split(".")[0] for kernel in plan.kernels} == {
        "paged_attention",
        "rope_kv_write",
        "rounds",
        "sampling",
        "kv_compact",
    }
    # merged weights in plain rows, as the cpu backend has them
    assert tensors["model.layers.0.self_attn.qkv_proj.weight"].shape == (8 * 64, 64)


def test_every_binding_of_a_piece_is_bound(engine: Path) -> None:
    """To a tensor of the plan of that type and size, or to an array of the step."""
    plan, _ = open_engine(engine)
    tensors = {tensor.name: tensor for tensor in plan.tensors}
    pieces = {piece.name: piece for piece in plan.trt_pieces}
    for op in (op for op in plan.ops if op.op == TENSORRT_OP):
        bindings = pieces[str(op.attributes["piece"])].bindings
        assert set(op.inputs) == {b["name"] for b in bindings if b["is_input"]}
        assert set(op.outputs) == {b["name"] for b in bindings if not b["is_input"]}
        for binding in bindings:
            name = {**op.inputs, **op.outputs}[binding["name"]]
            if name.startswith("step."):
                assert binding["dtype"] == "int32"
                continue
            found = tensors[name]
            assert found.dtype == binding["dtype"]
            shape = tuple(binding["shape"])
            assert found.shape in (shape, shape[1:]) or (shape == (1, 1) and found.shape == (1,))


def test_what_enters_a_piece_is_never_overwritten_by_it(engine: Path) -> None:
    """TensorRT may read an input after it has written an output."""
    plan, _ = open_engine(engine)
    rows = {"tokens": plan.max_num_tokens, "rows": plan.max_num_rows}
    sizes = {"float32": 4, "bfloat16": 2, "float8_e4m3fn": 1}
    places = {}
    for tensor in plan.tensors:
        if tensor.offset is not None:
            count = sizes[tensor.dtype]
            for dim in tensor.shape:
                count *= rows[dim] if isinstance(dim, str) else dim
            places[tensor.name] = range(tensor.offset, tensor.offset + count)
    for op in (op for op in plan.ops if op.op == TENSORRT_OP):
        read = [places[name] for name in op.inputs.values() if name in places]
        for written in (places[name] for name in op.outputs.values()):
            for other in read:
                assert written.stop <= other.start or other.stop <= written.start, op.name


def test_the_config_says_what_it_was_built_with(engine: Path) -> None:
    config = read_engine_config(engine)
    assert (config.backend, config.compute_capability) == ("tensorrt-rtx", "8.9")
    assert config.versions["tensorrt_rtx"].startswith("1.")
    assert config.plugin_config["gemm_plugin"] == "auto"
    assert config.build_config["kv_cache_type"] == "PAGED"


def test_inspect_shows_every_plans_kernels(
    engine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert execute(["inspect", str(engine)]) == 0
    out = capsys.readouterr().out
    assert "plan middle: " in out and "profile all" not in out
    (line,) = [x for x in out.splitlines() if "layer0.mlp.down_proj.gemm" in x and "plan" not in x][
        :1
    ]
    assert line.split()[0] == "gemm" and "fp8[" in line
    assert execute(["inspect", str(engine), "--json"]) == 0
    described = json.loads(capsys.readouterr().out)
    assert [piece["name"] for piece in described["trt_pieces"]] == ["first", "middle", "last"]
    layers = described["trt_pieces"][1]["profiles"][0]["layers"]
    assert sum(layer["kind"] == "gemm" for layer in layers) == 4


def test_a_dry_run_counts_the_plans(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = write_checkpoint(tmp_path / "c", "llama", "fp8")
    arguments = ["build", "--backend", "tensorrt-rtx", "--compute-capability", "8.9", *LIMITS]
    where = ["--checkpoint-dir", str(checkpoint), "--dry-run"]
    with stand_in_kernels():
        assert execute([*arguments, *where]) == 0
    out = capsys.readouterr().out
    assert "3 plans of" in out and "for compute capability 8.9" in out


def test_a_continuous_engine_is_one_operator(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "c", "qwen3", "bfloat16", num_hidden_layers=1)
    output = tmp_path / "engine"
    arguments = ["build", "--backend", "tensorrt-rtx", "--compute-capability", "8.9", *LIMITS]
    where = ("--checkpoint-dir", str(checkpoint), "--output-dir", str(output))
    assert execute([*arguments, *where, "--kv_cache_type", "continuous"]) == 0
    assert read_engine_config(output).build_config["kv_cache_type"] == "CONTINUOUS"
    plan, tensors = open_engine(output)
    assert [(op.op, op.attributes["piece"]) for op in plan.ops] == [(TENSORRT_OP, "whole")]
    assert [piece.name for piece in plan.trt_pieces] == ["whole", "tree"]
    bound = {b["name"] for b in plan.trt_pieces[0].bindings if b["is_input"]}
    weights = {t.name for t in plan.tensors if t.kind == "weight"}
    assert weights < bound and weights - set(plan.rotary) < set(tensors)
    assert not any("attention" in kernel.name for kernel in plan.kernels)


def test_every_rank_has_a_file(tmp_path: Path) -> None:
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 128}
    checkpoint = write_checkpoint(tmp_path / "c", "llama", "fp8", **sizes)
    output = tmp_path / "engine"
    arguments = ["build", "--backend", "tensorrt-rtx", "--compute-capability", "8.9", *LIMITS]
    where = ("--checkpoint-dir", str(checkpoint), "--output-dir", str(output))
    with stand_in_kernels():
        assert execute([*arguments, *where, "--tp_size", "2", "--workers", "2"]) == 0
    config = read_engine_config(output)
    assert set(config.files) == {"rank0.engine", "rank1.engine"}
    assert config.pretrained_config["mapping"]["tp_size"] == config.build_config["tp_size"] == 2
    assert config.pretrained_config["num_key_value_heads"] == 4
    (plan, first), (_, second) = (open_engine(output, rank) for rank in range(2))
    assert plan.kv_cache.num_kv_heads == 2
    name = "model.layers.0.mlp.down_proj.weight"
    assert first[name].shape == second[name].shape == (64, 64)
    assert not (first[name].view(dtype=torch.int32) == second[name].view(dtype=torch.int32)).all()


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["--compute-capability", "9.0"], 2, "error[Unsupported]: --compute-capability 9.0"),
        (["--compute-capability", "8.6"], 2, "error[Unsupported]: --compute-capability 8.6"),
        (["--tp_size", "3"], 2, "error[Unsupported]: --tp-size 3"),
        (["--gemm_plugin", "fp8"], 2, "error[Unsupported]: --gemm_plugin fp8 is refused"),
        (["--kv_cache_type", "continuous"], 2, "with an FP8 KV cache"),
        (["--backend", "cuda", "--tp_size", "3"], 2, "cuda backend have 1, 2, 4, 8 ranks"),
        (["--backend", "cuda", "--tp_size", "2"], 2, "intermediate_size of each rank is 56"),
    ],
)
def test_what_cannot_be_built_is_refused_by_name(
    arguments: list[str], code: int, text: str, tmp_path: Path, capsys
) -> None:
    checkpoint = write_checkpoint(tmp_path / "c", "llama", "fp8")
    base = ["build", "--checkpoint-dir", str(checkpoint), "--output-dir", str(tmp_path / "e")]
    backend = [] if "--backend" in arguments else ["--backend", "tensorrt-rtx"]
    assert execute([*base, *backend, *LIMITS, *arguments]) == code
    captured = capsys.readouterr()
    assert text in captured.err and captured.out == ""
