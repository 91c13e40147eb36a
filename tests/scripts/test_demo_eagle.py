"""The committed EAGLE-3 head, and what it learns from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.eagle import TorchHead
from tokenizers import Tokenizer

from scripts.demo.corpus import read_sample
from scripts.demo.eagle_head import EagleHead, EagleShape
from scripts.demo.eagle_training import measure_eagle, read_features
from scripts.demo.evaluation import function_prompts
from scripts.demo.head_rows import written_rows
from scripts.demo.model import read_model

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
FOLDER = EXAMPLES / "demo-eagle"


def test_the_committed_head_is_that_of_the_card() -> None:
    tensors = load_file(FOLDER / "model.safetensors")
    metrics = json.loads((FOLDER / "metrics.json").read_text())
    weights = [tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")]
    assert {tensor.dtype for tensor in weights} == {torch.bfloat16}
    count = sum(tensor.numel() for tensor in weights)
    assert count == metrics["parameters"]
    assert (FOLDER / "model.safetensors").stat().st_size <= 4_000_000
    card = (EXAMPLES / "README.md").read_text()
    assert f"{count:,} parameters" in card and f"({metrics['training_tokens']:,} tokens)" in card
    assert f"{len(tensors['d2t']):,} tokens that the target chooses most" in card
    assert f"{100 * metrics['vocabulary_share']:.0f} % are tokens that the" in card
    for row in ("first", "per_position", "ten"):
        shares = metrics["held_out"][row]
        assert " | ".join(f"{share:.3f}" for share in shares) in card
    assert f"({metrics['held_out']['tokens_per_round']:.2f} is expected of 5)" in card


def test_the_committed_head_is_nearly_as_often_right_on_a_few_prompts() -> None:
    target = read_model(EXAMPLES / "demo-target", torch.device("cpu"))
    tokenizer = Tokenizer.from_file(str(EXAMPLES / "demo-target/tokenizer.json"))
    prompts = function_prompts(tokenizer, read_sample(EXAMPLES / "heldout.txt"), 128, 8)
    written = written_rows(target, torch.tensor(prompts), 160, 0.0)
    head = EagleHead.read(FOLDER, target.model.embed_tokens.weight.detach())
    rows = read_features(target, written, head.shape.taps)
    found = measure_eagle(head, rows, 5, 127)
    assert found.first[0] > 0.65 and found.ten[0] > 0.75 and found.tokens_per_round > 2.5
    assert found.first[0] > found.first[4] > 0.2


def test_features_are_what_enters_the_layers() -> None:
    target = read_model(EXAMPLES / "demo-target", torch.device("cpu"))
    ids = torch.arange(40, 56)[None]
    rows = read_features(target, ids, (0, 3))
    table = target.model.embed_tokens.weight.detach()
    assert torch.equal(rows.features[0, :, :384], table[ids[0]].bfloat16())
    x = table[ids]
    for layer in target.model.layers[:3]:
        x = layer(x, target.get_buffer("rotary")[:, :16])
    wanted = x[0].detach()
    torch.testing.assert_close(rows.features[0, :, 384:].float(), wanted, rtol=0.1, atol=0.05)


@pytest.mark.parametrize("place", [0, 3, 6])
def test_an_unrolled_step_is_that_of_drafting_the_text(place: int) -> None:
    """Step s of a place sees the pairs up to it, then its own outputs with the text's tokens."""
    generator = torch.Generator().manual_seed(1)
    table = torch.randn((60, 32), generator=generator)
    kept = torch.arange(5, 25)
    torch.manual_seed(2)
    head = EagleHead(EagleShape(32, 48, 4, 2, (0, 1, 2)), table, kept)
    features = torch.randn((1, 7, 96), generator=generator)
    following = torch.randint(60, (1, 9), generator=generator)
    tensors = {name: tensor.detach() for name, tensor in head.state_dict().items()}
    marked = {"d2t": kept - torch.arange(20), "t2d": torch.zeros(60, dtype=torch.bool)}
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 60}  # fmt: skip
    plain = TorchHead(tensors | marked, table, **sizes)
    with torch.no_grad():
        steps = head.unroll(features, following, 3)
        g = plain.fc(features[0, : place + 1])
        for step in range(3):
            read = following[0, : place + 1 + step].tolist()
            out = plain.out(g, read)[-1:]
            torch.testing.assert_close(steps[step][0, place], out[0], rtol=1e-4, atol=1e-5)
            own = plain.logits(out)[0, kept]
            torch.testing.assert_close(
                head.logits(steps[step])[0, place], own, rtol=1e-4, atol=1e-5
            )
            g = torch.cat((g, out))
