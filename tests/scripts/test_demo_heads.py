"""The committed Medusa heads, and the recipe that made them."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.forked_program import ForkedProgram
from support.redrafter import TorchHead
from tokenizers import Tokenizer

from llmctl.cli.main import execute
from scripts.demo import encode
from scripts.demo.corpus import is_held_out, read_sample
from scripts.demo.evaluation import function_prompts
from scripts.demo.head_rows import HeadRows, read_rows, written_rows
from scripts.demo.head_training import _walk, measure
from scripts.demo.heads import MedusaHeads, RecurrentHead
from scripts.demo.model import read_model

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.parametrize("kind", ["medusa", "redrafter", "eagle"])
def test_one_command_trains_heads_that_build_reads(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    names = [f"module_{n}.py" for n in range(300)]
    held = [name for name in names if is_held_out(name)][:1]
    for name in [*[name for name in names if name not in held][:8], *held]:
        body = "".join(f"def f{n}(first):\n    return first + {n}\n\n\n" for n in range(40))
        (corpus / name).write_text(f'"""{name}"""\n{body}')
    script, *words = ["train_eagle"] if kind == "eagle" else ["train_heads", kind]
    words += ["--smoke", "--corpus", str(corpus), "--output", str(tmp_path / "heads")]
    monkeypatch.setattr(sys, "argv", [script, *words])
    runpy.run_path(str(EXAMPLES.parent / f"scripts/demo/{script}.py"), run_name="__main__")
    metrics = json.loads((tmp_path / "heads/metrics.json").read_text())
    assert len(metrics["history"]) == 10 and metrics["held_out"]["positions"] > 100
    build = ["build", "--backend", "cpu", "--checkpoint-dir", str(EXAMPLES / "demo-target")]
    build += ["--speculative-decoding-mode", kind, "--log-level", "error"]
    build += ["--draft-model-dir", str(tmp_path / "heads"), "--max-seq-len", "128"]
    assert execute([*build, "--output-dir", str(tmp_path / "engine")]) == 0


def test_a_corpus_encoded_ahead_is_the_same_text(tmp_path: Path, monkeypatch) -> None:
    corpus, encoded = tmp_path / "corpus", tmp_path / "corpus.npy"
    corpus.mkdir()
    names = [f"module_{n}.py" for n in range(300)]
    for name in [next(filter(is_held_out, names)), *[n for n in names if not is_held_out(n)][:2]]:
        (corpus / name).write_text(f"# {name}\n" + "def f():\n    return 1\n\n\n" * 20)
    command = ["encode", "--corpus", str(corpus), "--output", str(encoded)]
    monkeypatch.setattr(sys, "argv", command)
    encode.main()
    tokenizer = Tokenizer.from_file(str(EXAMPLES / "demo-target/tokenizer.json"))
    stream = encode.read_stream(tokenizer, corpus)
    assert np.array_equal(encode.read_stream(tokenizer, encoded), stream) and len(stream) > 200
    for wrong, says in ((stream, "wanted a row of uint16"), (np.uint16([5000]), "has id 5000")):
        np.save(encoded, wrong)
        with pytest.raises(SystemExit, match=says):
            encode.read_stream(tokenizer, encoded)


def test_a_position_counts_where_the_text_is_what_the_target_chose() -> None:
    tokens = torch.tensor([[0, 5, 6, 7, 9, 2]])
    chosen = torch.tensor([[5, 6, 7, 8, 2, 3]])
    rows = HeadRows(tokens, torch.zeros(1, 6, 2), chosen)
    (first, first_counts), (second, second_counts) = rows.depths(2)
    assert first.tolist() == [[6, 7, 8]] and first_counts.tolist() == [[True, True, True]]
    assert second.tolist() == [[7, 8, 2]] and second_counts.tolist() == [[True, True, False]]
    assert rows.following(2).tolist() == [[[5, 6], [6, 7], [7, 9]]]


def test_untrained_heads_say_what_the_target_says() -> None:
    hidden = torch.randn((3, 16), generator=torch.Generator().manual_seed(1))
    assert all(torch.equal(found, hidden) for found in MedusaHeads(2, 3, 16)(hidden))


@pytest.mark.parametrize(
    ("name", "file", "count"),
    [
        ("demo-medusa", "medusa_lm_head.safetensors", 887_040),
        ("demo-redrafter", "model.safetensors", 967_552),
    ],
)
def test_the_committed_heads_are_those_of_the_card(name: str, file: str, count: int) -> None:
    tensors = load_file(EXAMPLES / name / file)
    metrics = json.loads((EXAMPLES / name / "metrics.json").read_text())
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert sum(tensor.numel() for tensor in tensors.values()) == metrics["parameters"] == count
    card = (EXAMPLES / "README.md").read_text()
    assert f"{count:,} parameters" in card and f"{metrics['training_positions']:,}" in card
    for row in ("first", "per_position", "ten"):
        shares = metrics["held_out"][row]
        assert " | ".join(f"{share:.3f}" for share in shares) in card
    assert f"({metrics['held_out']['tokens_per_round']:.2f} is expected" in card


def test_the_committed_heads_are_nearly_as_often_right_on_a_few_prompts() -> None:
    from tokenizers import Tokenizer

    target = read_model(EXAMPLES / "demo-target", torch.device("cpu"))
    tokenizer = Tokenizer.from_file(str(EXAMPLES / "demo-target/tokenizer.json"))
    prompts = function_prompts(tokenizer, read_sample(EXAMPLES / "heldout.txt"), 128, 8)
    rows = read_rows(target, written_rows(target, torch.tensor(prompts), 160, 0.0))
    embedding = target.model.embed_tokens.weight.detach()
    heads = MedusaHeads.read(EXAMPLES / "demo-medusa", embedding)
    found = measure(heads, rows, 127)
    assert found.first[0] > 0.25 and found.ten[0] > 0.5
    assert found.first[0] > found.first[1] > found.first[2]
    recurrent = RecurrentHead.read(EXAMPLES / "demo-redrafter", 4, embedding)
    assert measure(recurrent, rows, 127).tokens_per_round > found.tokens_per_round > 1.2


def test_quantized_heads_are_measured_on_text_that_no_scale_comes_from(
    tmp_path: Path, forked_program: ForkedProgram
) -> None:
    command = [
        *forked_program.command,
        "quantize",
        "--model-dir",
        str(EXAMPLES / "demo-target"),
        "--calib-size",
        "48",
    ]
    command += ["--draft-model-dir", str(EXAMPLES / "demo-medusa"), "--json"]
    command += ["--calib-max-seq-length", "48", "--output-dir", str(tmp_path / "out")]
    command += ["--calib-dataset", str(EXAMPLES / "heldout.txt")]  # often what the target chooses
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["num_heads"] == 3 and result["positions"][0] >= result["positions"][2] > 20
    shares = list(zip(result["agreement_before"], result["agreement_after"], strict=True))
    for before, after in shares:
        assert 0 <= after <= 1 and abs(before - after) < 0.1
    assert shares[0][0] > 0.2 and shares[0][0] > shares[2][0]


def test_the_recurrent_head_computes_what_its_published_parameters_say() -> None:
    generator = torch.Generator().manual_seed(4)
    embedding = torch.randn((50, 16), generator=generator)
    torch.manual_seed(5)
    head = RecurrentHead(3, 24, embedding)
    torch.nn.init.normal_(head.lm_head[0].linear.weight, std=0.2)
    hidden = torch.randn((4, 16), generator=generator)
    tokens = torch.randint(50, (4, 3), generator=generator)
    reference = TorchHead("silu", {n: t.detach() for n, t in head.named_parameters()}, embedding)
    state = None
    with torch.no_grad():
        for depth, found in enumerate(head.logits(hidden, tokens)):
            state = reference.state(tokens[:, depth].tolist(), state)
            torch.testing.assert_close(found, reference.logits(hidden, state))


def test_a_walk_begins_each_round_where_the_one_before_ended() -> None:
    accepted = torch.tensor([[2, 0, 0, 1, 3], [0, 1, 0, 0, 0]])
    assert _walk(accepted) == (3 + 2 + 1 + 2 + 1 + 1) / 6


def test_heads_learn_the_distribution_as_well_as_the_choice() -> None:
    """Of two tokens with 0.6 and 0.4: where the choice has half the weight, 0.8 and 0.2."""
    from scripts.demo.head_training import train_heads
    from scripts.demo.training import Schedule

    generator = torch.Generator().manual_seed(2)
    tokens = torch.full((4, 12), 3)
    hidden = torch.randn((4, 12, 16), generator=generator).bfloat16()
    hidden[..., 0] = 1
    projection = torch.zeros((11, 16))
    projection[:, 0] = -20
    projection[[3, 5], 0] = torch.tensor([0.6, 0.4]).log()
    rows = HeadRows(tokens, hidden, tokens)
    torch.manual_seed(3)
    head = RecurrentHead(2, 8, torch.randn((11, 16), generator=generator), num_layers=2)
    schedule = Schedule(num_steps=300, learning_rate=2e-2, warmup_steps=5, weight_decay=0.0)
    train_heads(head, rows, projection, schedule, 16, lambda: measure(head, rows), 0)
    with torch.no_grad():
        for logits in head.logits(hidden[:, 0].float(), tokens[:, :2]):
            said = logits.softmax(-1)
            assert (said[:, 3] - 0.8).abs().max() < 0.05 and (said[:, 5] - 0.2).abs().max() < 0.05


def test_a_recurrent_head_begins_with_the_targets_output_matrix() -> None:
    projection = torch.randn((40, 16), generator=torch.Generator().manual_seed(5))
    head = RecurrentHead(1, 16, projection)
    head.start_from(projection)
    hidden = torch.randn((3, 16), generator=torch.Generator().manual_seed(6))
    with torch.no_grad():
        head.input_proj.bias.zero_()
        found = head.lm_head[1](head.input_proj(torch.cat([hidden, torch.zeros(3, 16)], -1)))
    torch.testing.assert_close(found, hidden @ projection.T, rtol=1e-4, atol=1e-4)
