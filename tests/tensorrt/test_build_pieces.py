"""The pieces of TensorRT engines as the real builder makes them, without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.tensorrt.build import (
    compile_engine,
    linear_weights,
    plan_engine,
    profile_kernels,
    readers,
    types,
    write_config,
)
from support.tensorrt.checkpoints import FAMILIES, FORMS, write_checkpoint

from llmctl.builder.engine_format import TENSORRT_OP

LIMITS = {"max_batch_size": 64, "max_seq_len": 8192, "max_num_tokens": 2048, "max_draft_len": 7}
SMALL = {"max_batch_size": 4, "max_seq_len": 96, "max_num_tokens": 64, "max_draft_len": 4}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """built(form, ...) -> (engine, pieces) of three layers of an 8B model, each compiled once."""
    found = {}

    def build(form: str, **options):
        key = (form, *sorted(options.items()))
        if key not in found:
            folder = tmp_path_factory.mktemp("8b")
            found[key] = compile_engine(write_config(folder, form), **LIMITS, **options)
        return found[key]

    return build


# ---- every family, every form ----


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_and_form_is_built(family: str, form: str, tmp_path: Path) -> None:
    engine, pieces = compile_engine(write_checkpoint(tmp_path / "c", family, form), **SMALL)
    assert list(pieces) == ["first", "middle", "last"]
    ops = [op.attributes["piece"] for op in engine.plan.ops if op.op == TENSORRT_OP]
    assert ops == ["first", "middle", "middle", "last"]
    for piece in engine.pieces:
        for _, layers in profile_kernels(pieces[piece.name]):
            for weight in linear_weights(piece, fp8=True):
                assert_fp8_product(layers, weight)


def test_a_quantized_head_is_an_fp8_gemm_with_float32_logits(tmp_path: Path) -> None:
    folder = write_config(tmp_path, "fp8")
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace('"ignore": ["lm_head"]', '"ignore": []'))
    _, pieces = compile_engine(folder, **LIMITS)
    for _, layers in profile_kernels(pieces["last"]):
        assert_fp8_product(layers, "lm_head.weight")
        written = [o for layer in layers for o in layer["outputs"] if o.startswith("logits:")]
        assert types(written) == ["fp32"]


def assert_fp8_product(layers, weight: str) -> None:
    """One kernel reads the weight, as it is stored, and multiplies it with FP8 activations."""
    (product,) = readers(layers, weight)
    assert product["kind"] == "gemm", product
    assert types(product["inputs"])[:2] == ["fp8", "fp8"], product


def test_the_check_sees_a_product_that_is_not_fp8(tmp_path: Path) -> None:
    engine, pieces = compile_engine(write_checkpoint(tmp_path / "c", "llama", "float16"), **SMALL)
    for _, layers in profile_kernels(pieces["first"]):
        (weight,) = linear_weights(engine.pieces[0], fp8=False)
        with pytest.raises(AssertionError):
            assert_fp8_product(layers, weight)


def test_a_draft_engine_has_one_row_a_sequence(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "c", "llama", "bfloat16")
    engine = plan_engine(checkpoint, max_batch_size=4, max_seq_len=96)
    assert (engine.limits.max_draft_len, engine.plan.max_num_rows) == (0, 4)


def test_a_model_of_one_layer_has_no_middle(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "c", "llama", "bfloat16", num_hidden_layers=1)
    _, pieces = compile_engine(checkpoint, **SMALL)
    assert list(pieces) == ["first", "last"]


def test_layers_that_differ_get_pieces_of_their_own(tmp_path: Path) -> None:
    """A layer left unquantized is another middle; the others still share one."""
    folder = write_config(tmp_path, "fp8", num_hidden_layers=6)
    config = (folder / "config.json").read_text()
    excluded = '"ignore": ["lm_head", "re:.*layers.2.mlp.*"]'
    (folder / "config.json").write_text(config.replace('"ignore": ["lm_head"]', excluded))
    engine = plan_engine(folder, **LIMITS)
    order = [op.attributes["piece"] for op in engine.plan.ops if op.op == TENSORRT_OP]
    assert order == ["first", "middle1", "middle1", "middle2", "middle1", "middle1", "last"]


# ---- real shapes ----


@pytest.mark.parametrize("form", ["fp8", "fp8 per token"])
def test_every_linear_of_an_fp8_model_is_one_fp8_gemm(built, form: str) -> None:
    engine, pieces = built(form)
    counted = 0
    for piece in engine.pieces:
        for _, layers in profile_kernels(pieces[piece.name]):
            for weight in linear_weights(piece, fp8=True):
                assert_fp8_product(layers, weight)
                counted += 1
    assert counted == 2 * (1 + 4 + 3)  # profiles * (qkv; o, gate_up, down, qkv; o, gate_up, down)


@pytest.mark.parametrize("form", ["bfloat16", "fp8", "fp8 per token"])
def test_no_weight_is_copied_or_transposed(built, form: str) -> None:
    engine, pieces = built(form)
    for piece in engine.pieces:
        weights = linear_weights(piece, fp8=True) + linear_weights(piece, fp8=False)
        for _, layers in profile_kernels(pieces[piece.name]):
            for weight in weights:
                (product,) = readers(layers, weight)
                assert product["kind"] in ("gemm", "runtime_fusion"), product


def test_a_layer_is_nine_kernels_and_attention_or_fewer(built) -> None:
    """Four products, and what lies between them each in one kernel."""
    for form, most in (("fp8", 8), ("fp8 per token", 9), ("bfloat16", 8)):
        for profile, layers in profile_kernels(built(form)[1]["middle"]):
            assert len(layers) <= most, (form, profile["name"], [x["name"] for x in layers])


def test_what_enters_and_leaves_a_piece_in_fp8_needs_no_kernel_of_its_own(built) -> None:
    """Attention writes FP8 for the output projection, which reads it as it is."""
    _, pieces = built("fp8")
    types_of = {b["name"]: b["dtype"] for b in pieces["middle"].bindings}
    assert types_of["attention"] == "float8_e4m3fn"
    for _, layers in profile_kernels(pieces["middle"]):
        assert [x["kind"] for x in readers(layers, "attention")] == ["gemm"]


def test_plans_hold_no_weights(built) -> None:
    for form in ("bfloat16", "fp8"):
        for piece in built(form)[1].values():
            assert piece.num_bytes < 4e6, piece.name


def test_memory_does_not_depend_on_how_long_sequences_are(built) -> None:
    def memory(max_seq_len: int) -> list[int]:
        limits = {**LIMITS, "max_seq_len": max_seq_len}
        folder = write_config(Path(engine.checkpoint.path), "fp8")
        pieces = compile_engine(folder, **limits)[1].values()
        return [p["activation_bytes"] for piece in pieces for p in piece.profiles]

    engine, _ = built("fp8")
    assert memory(2048) == memory(8192)


def test_memory_is_that_of_the_widest_layer(built) -> None:
    """The context profile holds the gate and up products of all its tokens, and little else."""
    _, pieces = built("fp8")
    _, context = pieces["middle"].profiles
    wide = 2048 * 2 * 14336 * 4
    assert wide < context["activation_bytes"] < 1.6 * wide


# ---- profiles and targets ----


def test_profiles_cover_every_step(built) -> None:
    _, pieces = built("fp8")
    generation, context = pieces["middle"].profiles
    assert (generation["name"], generation["sizes"]["tokens"]) == ("generation", [1, 512, 512])
    assert (context["name"], context["sizes"]["tokens"]) == ("context", [1, 2048, 2048])
    assert context["sizes"]["rows"][2] == 512


def test_one_profile_where_several_are_not_wanted(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "c", "llama", "bfloat16")
    limits = {"max_batch_size": 8, "max_seq_len": 128, "max_num_tokens": 1024}
    for plugins, wanted in ((None, ["generation", "context"]), ("disable", ["all"])):
        chosen = {"multiple_profiles": plugins} if plugins else None
        _, pieces = compile_engine(checkpoint, **limits, plugins=chosen)
        for piece in pieces.values():
            assert [p["name"] for p in piece.profiles] == wanted
            assert piece.profiles[-1]["sizes"]["tokens"][2] == 1024


@pytest.mark.parametrize(
    ("form", "targets"), [("bfloat16", "8.6,8.9,12.0"), ("fp8", "8.9,12.0"), ("fp8", "12.0")]
)
def test_one_plan_serves_several_gpus(form: str, targets: str, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "c", "llama", form)
    engine, pieces = compile_engine(checkpoint, **SMALL, compute_capability=targets)
    assert engine.config.compute_capability == targets
    assert set(pieces) == {"first", "middle", "last"}
