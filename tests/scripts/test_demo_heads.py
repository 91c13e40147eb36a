"""The committed Medusa heads, and the recipe that made them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from llmctl.cli.main import execute
from scripts.demo.corpus import is_held_out, read_sample
from scripts.demo.evaluation import function_prompts
from scripts.demo.head_rows import HeadRows, read_rows, written_rows
from scripts.demo.head_training import measure
from scripts.demo.heads import MedusaHeads
from scripts.demo.model import read_model

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_one_command_trains_heads_that_build_reads(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    names = [f"module_{n}.py" for n in range(300)]
    held = [name for name in names if is_held_out(name)][:1]
    for name in [*[name for name in names if name not in held][:8], *held]:
        body = "".join(f"def f{n}(first):\n    return first + {n}\n\n\n" for n in range(40))
        (corpus / name).write_text(f'"""{name}"""\n{body}')
    command = [sys.executable, "-m", "scripts.demo.train_heads", "--smoke"]
    command += ["--corpus", str(corpus), "--output", str(tmp_path / "heads")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    metrics = json.loads((tmp_path / "heads/metrics.json").read_text())
    assert len(metrics["history"]) == 10 and metrics["held_out"]["positions"] > 100
    build = ["build", "--backend", "cpu", "--checkpoint-dir", str(EXAMPLES / "demo-target")]
    build += ["--speculative-decoding-mode", "medusa", "--log-level", "error"]
    build += ["--draft-model-dir", str(tmp_path / "heads"), "--max-seq-len", "128"]
    assert execute([*build, "--output-dir", str(tmp_path / "engine")]) == 0


def test_a_position_counts_where_the_text_is_what_the_target_chose() -> None:
    tokens = torch.tensor([[0, 5, 6, 7, 9, 2]])
    chosen = torch.tensor([[5, 6, 7, 8, 2, 3]])
    rows = HeadRows(tokens, torch.zeros(1, 6, 2), chosen)
    (first, first_counts), (second, second_counts) = rows.depths(2)
    assert first.tolist() == [[6, 7, 8]] and first_counts.tolist() == [[True, True, True]]
    assert second.tolist() == [[7, 8, 2]] and second_counts.tolist() == [[True, True, False]]


def test_untrained_heads_say_what_the_target_says() -> None:
    hidden = torch.randn((3, 16), generator=torch.Generator().manual_seed(1))
    assert all(torch.equal(found, hidden) for found in MedusaHeads(2, 3, 16)(hidden))


def test_the_committed_heads_are_those_of_the_card() -> None:
    tensors = load_file(EXAMPLES / "demo-medusa/medusa_lm_head.safetensors")
    metrics = json.loads((EXAMPLES / "demo-medusa/metrics.json").read_text())
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert sum(tensor.numel() for tensor in tensors.values()) == metrics["parameters"] == 887_040
    config = json.loads((EXAMPLES / "demo-medusa/config.json").read_text())
    assert (config["medusa_num_heads"], config["medusa_num_layers"]) == (3, 2)
    card = (EXAMPLES / "README.md").read_text()
    for row in ("first", "per_position", "ten"):
        shares = metrics["held_out"][row]
        assert " | ".join(f"{share:.3f}" for share in shares) in card


def test_the_committed_heads_are_nearly_as_often_right_on_a_few_prompts() -> None:
    from tokenizers import Tokenizer

    target = read_model(EXAMPLES / "demo-target", torch.device("cpu"))
    tokenizer = Tokenizer.from_file(str(EXAMPLES / "demo-target/tokenizer.json"))
    prompts = function_prompts(tokenizer, read_sample(EXAMPLES / "heldout.txt"), 128, 8)
    rows = read_rows(target, written_rows(target, torch.tensor(prompts), 160, 0.0))
    heads = MedusaHeads.read(EXAMPLES / "demo-medusa")
    found = measure(heads, target.model.embed_tokens.weight.detach(), rows, 127)
    assert found.first[0] > 0.25 and found.ten[0] > 0.5
    assert found.first[0] > found.first[1] > found.first[2]


def test_quantized_heads_are_measured_on_text_that_no_scale_comes_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["quantize", "--model-dir", str(EXAMPLES / "demo-target"), "--calib-size", "48"]
    command += ["--draft-model-dir", str(EXAMPLES / "demo-medusa"), "--json"]
    command += ["--calib-max-seq-length", "48", "--output-dir", str(tmp_path / "out")]
    assert execute(command) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["num_heads"] == 3 and result["positions"][0] >= result["positions"][2] > 20
    shares = list(zip(result["agreement_before"], result["agreement_after"], strict=True))
    for before, after in shares:
        assert 0 <= after <= 1 and abs(before - after) < 0.1
    assert shares[0][0] > 0.25 and shares[0][0] > shares[2][0]
