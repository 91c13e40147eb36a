"""`llmctl build` from the command line, with the option spellings of trtllm-build."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.attention_models import give_heads
from support.bad_checkpoints import configure
from transformers import AutoModelForCausalLM

from llmctl.builder.binaries import Binaries
from llmctl.builder.engine_format import Plan, open_engine, read_engine_config
from llmctl.cli.main import execute


@pytest.fixture
def checkpoint(new_model, save) -> Path:
    folder = Path(save(new_model("llama", dtype="bfloat16")))
    (folder / "tokenizer.json").write_text('{"model": {"type": "BPE", "vocab": {"a": 0}}}')
    return folder


def test_the_articles_target_command_builds(checkpoint: Path, tmp_path: Path) -> None:
    output = tmp_path / "target"
    code = execute(
        [
            "build",
            f"--checkpoint_dir={checkpoint}",
            *("--output_dir", str(output)),
            *("--gpt_attention_plugin", "bfloat16"),
            *("--gemm_plugin", "auto"),
            "--use_paged_context_fmha=enable",
            *("--multiple_profiles", "enable"),
            *("--max_batch_size", "4"),
            *("--max_input_len", "64"),
            *("--max_seq_len", "96"),
            *("--max_num_tokens", "128"),
            *("--reduce_fusion", "disable"),
            *("--workers", "4"),
            "--max_draft_len=10",
            "--speculative_decoding_mode=draft_tokens_external",
            *("--remove_input_padding", "enable"),
            *("--max_beam_width", "1"),
            "--gather_generation_logits",
            "--kv_cache_type=paged",
            *("--log_level", "error"),
        ]
    )
    assert code == 0
    config = read_engine_config(output)
    assert config.build_config["max_draft_len"] == 10
    assert config.build_config["speculative_decoding_mode"] == 2
    assert config.build_config["max_seq_len"] == 96
    assert config.plugin_config["gpt_attention_plugin"] == "bfloat16"
    assert config.tokenizer["vocab_size"] == 1
    assert (output / "tokenizer" / "tokenizer.json").is_file()
    plan, _ = open_engine(output)
    assert plan.max_num_rows == 44 and plan.max_num_tokens == 128


def test_a_dry_run_prints_the_memory_plan_and_writes_nothing(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(tmp_path.iterdir())
    arguments = ["build", "--checkpoint-dir", str(checkpoint), "--dry-run"]
    assert execute([*arguments, "--output-dir", str(tmp_path / "engine")]) == 0
    out = capsys.readouterr().out
    for word in ("weights", "activations", "KV cache", "bytes", "8 sequences", "batch 8", "disk: "):
        assert word in out
    assert sorted(tmp_path.iterdir()) == before


def test_json_is_one_line_on_stdout(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "engine"
    assert (
        execute(
            ["build", "--checkpoint-dir", str(checkpoint), "--output-dir", str(output), "--json"]
        )
        == 0
    )
    captured = capsys.readouterr()
    (line,) = captured.out.splitlines()
    summary = json.loads(line)
    assert summary["engine_bytes"] == (output / "rank0.engine").stat().st_size
    assert summary["output_dir"] == str(output)
    assert "lowered from 2048" in captured.err


def test_sizes_of_several_ranks_are_said_to_be_those_of_each(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["build", "--checkpoint-dir", str(checkpoint), "--backend", "cpu", "--tp-size", "2"]
    assert execute([*words, "--output-dir", str(tmp_path / "one")]) == 0
    assert "B for each of 2 ranks in 00:" in capsys.readouterr().out
    assert execute([*words, "--output-dir", str(tmp_path / "other"), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["num_ranks"] == 2
    assert summary["engine_bytes"] == (tmp_path / "other/rank1.engine").stat().st_size


@pytest.mark.parametrize("ids", [[5, 7], 5, None])
def test_end_ids_come_from_the_generation_config(
    ids: Any, checkpoint: Path, tmp_path: Path
) -> None:
    """Also where it has none, and config.json has: transformers' generate does not ask that."""
    configure(checkpoint, eos_token_id=9)
    (checkpoint / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    assert AutoModelForCausalLM.from_pretrained(checkpoint).generation_config.eos_token_id == ids
    output = tmp_path / "engine"
    assert execute(["build", "--checkpoint-dir", str(checkpoint), "--output-dir", str(output)]) == 0
    assert read_engine_config(output).pretrained_config["eos_token_id"] == ids


def test_a_missing_tokenizer_is_reported(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (checkpoint / "tokenizer.json").unlink()
    assert execute(["build", "--checkpoint-dir", str(checkpoint), "--dry-run"]) == 0
    assert "no tokenizer.json; `run` will need --tokenizer-dir" in capsys.readouterr().err


def test_options_win_over_the_build_config_file(checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "build.json"
    file.write_text('{"max_batch_size": 3, "max_seq_len": 50}')
    output = tmp_path / "engine"
    arguments = ["build", "--checkpoint-dir", str(checkpoint), "--output-dir", str(output)]
    assert execute([*arguments, "--build-config", str(file), "--max-batch-size", "5"]) == 0
    build = read_engine_config(output).build_config
    assert (build["max_batch_size"], build["max_seq_len"]) == (5, 50)


def test_the_network_can_be_written_as_text(checkpoint: Path, tmp_path: Path) -> None:
    text = tmp_path / "network.txt"
    arguments = ["build", "--checkpoint-dir", str(checkpoint), "--dry-run"]
    assert execute([*arguments, "--visualize-network", str(text)]) == 0
    assert "[cpu.paged_attention.bf16]" in text.read_text()


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["--kv_cache_type", "continuous"], 2, "error[Unsupported]: --kv-cache-type continuous"),
        (["--backend", "bogus"], 2, "error[BadConfig]: backend is bogus"),
        (["--backend", "bogus", "--dry-run"], 2, "error[BadConfig]: backend is bogus"),
        (["--max-beam-width", "4"], 2, "error[Unsupported]: --max-beam-width 4 is refused"),
        (["--context_fmha", "disable"], 2, "error[Unsupported]: --context_fmha disable"),
        (["--gemm_plugin", "fp8"], 2, "no FP8 linears"),
        (["--gather_context_logits"], 2, "fix: leave --gather-context-logits out"),
        (["--log_level", "loud"], 2, "error[BadConfig]: --log-level is 'loud'"),
        (["--lora_dir", "x"], 2, "error[Unsupported]: --lora-dir"),
        (["--kv_cache_dtype", "fp8"], 1, "error[MissingTensor]"),
        (["--build-config", "/nowhere.json"], 2, "error[BadConfig]"),
    ],
)
def test_what_cannot_be_honoured_is_refused_with_its_name_and_code(
    arguments: list[str],
    code: int,
    text: str,
    checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = tmp_path / "engine"
    base = ["build", "--checkpoint-dir", str(checkpoint), "--output-dir", str(output)]
    assert execute([*base, *arguments]) == code
    captured = capsys.readouterr()
    assert text in captured.err and captured.out == ""
    assert not output.exists()


def test_an_existing_output_is_refused(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = ["build", "--checkpoint-dir", str(checkpoint), "--output-dir", str(tmp_path)]
    assert execute(base) == 1
    assert "error[OutputExists]" in capsys.readouterr().err


def test_every_plugin_option_is_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    from llmctl.builder.plugin_config import OPTIONS
    from llmctl.cli.build.command import build

    names = build.__annotations__
    assert set(OPTIONS) <= set(names)
    assert execute(["build", "--help"]) == 0
    assert "--output-dir" in capsys.readouterr().out


def test_a_planted_engine_is_what_its_checkpoint_says_unless_told_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_binaries(plan: Plan, *_: object) -> tuple[Plan, Binaries, dict[str, str]]:
        return plan, {}, {}

    monkeypatch.setattr("llmctl.builder.build.make_binaries", no_binaries)
    words = ["--target", "tiny", "--draft", "tiny", "--config-only", "--seed", "7"]
    made = [
        sys.executable,
        "-m",
        "scripts.models.make_planted_checkpoints",
        str(tmp_path / "made"),
        *words,
        "--acceptance",
        "0.3",
    ]
    subprocess.run(made, check=True, capture_output=True)
    for name in ("target", "draft"):
        give_heads(tmp_path / "made" / name, "1b")
    build = ["build", "--backend", "cuda", "--load-format", "planted", "--dtype", "bfloat16"]
    build += ["--max-batch-size", "1", "--max-num-tokens", "32", "--max-seq-len", "96"]
    wanted = {"draft": ("draft", 0.3), "target": ("target", 0.3)}
    for name, (role, acceptance) in wanted.items():
        source, output = tmp_path / "made" / name, tmp_path / name
        words = ["--checkpoint-dir", str(source), "--output-dir", str(output)]
        assert execute([*build, *words]) == 0
        weights = read_engine_config(output).weights
        assert (weights["seed"], weights["role"]) == (7, role)
        assert weights["acceptance"] == acceptance
    told = tmp_path / "told"
    words = ["--checkpoint-dir", str(tmp_path / "made" / "target"), "--output-dir", str(told)]
    assert execute([*build, *words, "--planted-role", "draft", "--seed", "3"]) == 0
    weights = read_engine_config(told).weights
    assert (weights["seed"], weights["role"], weights["acceptance"]) == (3, "draft", 0.3)


def test_a_fusion_of_sums_over_ranks_is_accepted_where_there_is_one_rank(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build = ["build", "--checkpoint_dir", str(checkpoint), "--output_dir", str(tmp_path / "engine")]
    assert execute([*build, "--backend", "cpu", "--reduce_fusion", "enable"]) == 0
    assert "note: reduce_fusion enable: the engine has one rank" in capsys.readouterr().err
