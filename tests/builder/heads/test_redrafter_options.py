"""What is asked of a ReDrafter head at build, what the engine says of it, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support.redrafter import RECURRENCES, make_head, save_as, save_head
from support.redrafter_engine import BEAMS, HIDDEN, REDRAFTER, VOCAB, build, tensors_of

from llmctl.builder.build import plan_build
from llmctl.builder.config import BuildRequest
from llmctl.builder.engine_format import open_engine, read_engine_config
from llmctl.cli.main import execute
from llmctl.errors import BadConfig, BadTensorValue, CheckpointNotFound, PairMismatch, Unsupported


@pytest.fixture
def target(new_model, save) -> Path:
    return save(new_model("llama", head_dim=64))


@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_the_engine_says_what_it_was_built_with(tmp_path, target, capsys, recurrence):
    head = save_as(tmp_path / "head", recurrence, tensors_of(recurrence))
    folder = build(target, tmp_path / "engine", head)
    build_config = read_engine_config(folder).build_config
    assert build_config["draft_heads"] == {
        "recurrence": recurrence,
        "num_layers": 2,
        "exit_dim": 2 * HIDDEN,
        "num_beams": 3,
        "draft_len_per_beam": 2,
        "greedy_search": False,
    }
    assert build_config["max_draft_len"] == 6
    assert build_config["speculative_decoding_mode"] == 16, "as TensorRT-LLM counts"
    assert execute(["inspect", str(folder)]) == 0
    text = capsys.readouterr().out
    formula = {"silu": "SiLU(W e + U s + b)", "linear": "first s = W e", "sum": "s = s + e"}
    assert formula[recurrence] in text and "3 beams of 2 drafts" in text
    assert "head redrafter.first: hidden (base.hidden) -> context, logits, carry" in text


def test_tensorrt_llms_name_of_the_mode_is_the_same_mode(tmp_path, target):
    head = save_head(tmp_path / "head", tensors_of("silu"))
    files = [
        build(target, tmp_path / mode, head, speculative_decoding_mode=mode) / "rank0.engine"
        for mode in ("redrafter", "explicit_draft_tokens")
    ]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_what_nothing_is_said_of_is_the_heads_own_or_tensorrt_llms_default(tmp_path, target):
    silent = dict.fromkeys(BEAMS)
    for kind, sizes in (("linear", (3, 2)), ("silu", (5, 5))):
        head = save_as(tmp_path / f"{kind}-head", kind, tensors_of(kind))
        folder = build(target, tmp_path / kind, head, **silent, redrafter_greedy_search=True)
        facts = read_engine_config(folder).build_config["draft_heads"]
        assert (facts["num_beams"], facts["draft_len_per_beam"]) == sizes
        assert facts["greedy_search"] is True


def test_the_source_of_both_files_is_recorded(tmp_path, target):
    head = save_head(tmp_path / "head", tensors_of("silu"))
    files = read_engine_config(build(target, tmp_path / "engine", head)).source["files"]
    assert set(files) == {"config.json", "model.safetensors", "draft_model_dir/model.safetensors"}


def test_a_head_beside_an_fp8_target_keeps_its_dtype(tmp_path, quantized):
    head = save_head(tmp_path / "head", tensors_of("silu"))
    folder = build(quantized, tmp_path / "engine", head, dtype="bfloat16")
    plan, weights = open_engine(folder)
    assert weights["drafter.layers.0.linear.weight"].dtype == torch.bfloat16
    assert "float8_e4m3fn" in {tensor.dtype for tensor in plan.tensors}


@pytest.mark.parametrize(
    ("fields", "error", "found"),
    [
        ({"redrafter_num_beams": 0}, BadConfig, "redrafter_num_beams is 0"),
        ({"redrafter_num_beams": 65}, BadConfig, "is 65; with 131 tokens it must be at most 64"),
        ({"redrafter_draft_len_per_beam": 400}, BadConfig, "1200 drafts per round; at most 1024"),
        ({"max_draft_len": 5}, BadConfig, "are 6 drafts per round; --max-draft-len is 5"),
        ({"max_draft_len": 7}, BadConfig, "are 6 drafts per round; --max-draft-len is 7"),
        ({"draft_model_dir": None}, BadConfig, "redrafter needs a ReDrafter head"),
        ({"num_medusa_heads": 2}, BadConfig, "--num-medusa-heads is for .* medusa, and"),
        (
            {"speculative_decoding_mode": "medusa"},
            BadConfig,
            "--redrafter-num-beams is for --speculative-decoding-mode redrafter, and the mode is m",
        ),
        (
            {**dict.fromkeys(BEAMS), "speculative_decoding_mode": None, "max_draft_len": 4},
            BadConfig,
            "--draft-model-dir is for --speculative-decoding-mode medusa and redrafter",
        ),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, target, fields, error, found):
    head = save_head(tmp_path / "head", tensors_of("silu"))
    with pytest.raises(error, match=found):
        plan_build(
            target,
            BuildRequest(**{**REDRAFTER, "draft_model_dir": str(head), **fields}),
            backend="cpu",
        )


@pytest.mark.parametrize(("hidden", "vocab"), [(32, VOCAB), (HIDDEN, 130)])
def test_a_head_of_another_target_is_refused(tmp_path, target, hidden, vocab):
    head = save_head(tmp_path / "head", make_head(hidden, vocab))
    request = BuildRequest(**REDRAFTER, draft_model_dir=str(head))
    with pytest.raises(PairMismatch, match="the target has"):
        plan_build(target, request, backend="cpu")
    with pytest.raises(CheckpointNotFound, match="config.json does not exist"):
        plan_build(target, BuildRequest(**REDRAFTER, draft_model_dir="nowhere"), backend="cpu")


def test_backends_without_heads_refuse_it(tmp_path, target):
    head = save_head(tmp_path / "head", tensors_of("silu"))
    request = BuildRequest(**REDRAFTER, draft_model_dir=str(head), dtype="bfloat16")
    with pytest.raises(Unsupported, match=r"redrafter\.first"):
        plan_build(target, request, backend="tensorrt-rtx")


def test_a_weight_that_is_no_number_is_refused_when_it_is_read(tmp_path, target):
    tensors = tensors_of("silu")
    tensors["rnn_u.weight"][5, 7] = float("nan")
    head = save_head(tmp_path / "head", tensors)
    with pytest.raises(BadTensorValue, match="drafter.rnn_u.weight holds NaN"):
        build(target, tmp_path / "engine", head)
    assert not (tmp_path / "engine").exists()


def test_the_command_line_builds_it_from_its_own_options(tmp_path, target):
    head = save_head(tmp_path / "head", tensors_of("silu"))
    options = ["--redrafter_num_beams", "2", "--redrafter-draft-len-per-beam", "4"]
    options += ["--redrafter_greedy_search", "--backend", "cpu", "--max_batch_size", "2"]
    command = ["build", "--checkpoint_dir", str(target), "--output_dir", str(tmp_path / "engine")]
    command += ["--speculative_decoding_mode", "redrafter", "--draft_model_dir", str(head)]
    assert execute([*command, *options]) == 0
    facts = json.loads((tmp_path / "engine/config.json").read_text())["build_config"]["draft_heads"]
    assert (facts["num_beams"], facts["draft_len_per_beam"]) == (2, 4) and facts["greedy_search"]
