"""The torch module of an EAGLE head, which `llmctl quantize` calibrates, computes what plain torch
does, of each form that is read."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.eagle import HEAD_FORMS, HIDDEN, VOCAB, TorchHead, make_head, save_head
from support.eagle_first import FirstHead

from llmctl.cli.quantize_heads import KINDS
from llmctl.quantize.heads.heads import DraftHeads

TAPS, STEPS, COUNT = (2, 3, 3), 5, 9
PLACES = (0, 3, 8)  # whose steps are compared
SOURCE: Any = SimpleNamespace(
    model=SimpleNamespace(
        config=SimpleNamespace(hidden_size=HIDDEN, vocab_size=VOCAB), num_layers=6
    )
)
SLIDING, FULL = "sliding_attention", "full_attention"
FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # (of the tensors, of config.json)
    **HEAD_FORMS,
    "layers": ({"layers": 3, "qk_norm": True}, {"num_hidden_layers": 3}),
    "windows": ({"layers": 2}, {"sliding_window": 3, "layer_types": [SLIDING, FULL]}),
    "window": ({}, {"sliding_window": 1, "layer_types": [SLIDING]}),
}  # fmt: skip


def read(folder: Path) -> DraftHeads:
    heads: DraftHeads = next(read for is_such, read in KINDS if is_such(folder))(folder, SOURCE)
    return heads


def steps_of(heads: DraftHeads, projection: Any, table: Any, features: Any, text: Any) -> Any:
    """[steps, places, vocabulary] of the module with the head's own weights."""
    module = heads.make(projection, table)
    weights = {
        f"{path}.{kind}": heads.source.read(f"{name}.{kind}")
        for path, name in heads.linears.items()
        for kind in (("weight", "bias") if path in heads.biases else ("weight",))
    }
    weights |= {path: heads.source.read(name) for path, name in heads.kept.items()}
    module.load_state_dict(weights, assign=True)
    with torch.no_grad():
        return torch.stack(list(module(features, text.unfold(0, STEPS, 1)[:COUNT])))


def random_text() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(features of three taps, tokens, an embedding, an output matrix)."""
    generator = torch.Generator().manual_seed(1)
    features = torch.randn((COUNT, 3 * HIDDEN), generator=generator)
    text = torch.randint(0, VOCAB, (COUNT + STEPS,), generator=generator)
    table, projection = torch.randn((2, VOCAB, HIDDEN), generator=generator)
    return features, text, table, projection


@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_a_head_of_eagle_3(form: str, tmp_path: Path) -> None:
    sizes, fields = FORMS[form]
    tensors = make_head(5, **sizes)
    heads = read(save_head(tmp_path, tensors, eagle_aux_hidden_state_layer_ids=TAPS, **fields))
    assert heads.taps == TAPS and not heads.biases
    features, text, table, projection = random_text()
    found = steps_of(heads, projection, table, features, text)
    windows = {"layers": (0, 0, 0), "windows": (3, 0), "window": (1,)}.get(form, (0,))
    wanted = TorchHead.of_config(tensors, table, fields, windows)
    for place in PLACES:
        g, tokens = wanted.fc(features[: place + 1]), text.tolist()
        for step in range(STEPS):
            out = wanted.out(g, tokens[: place + 1 + step])[-1:]
            g = torch.cat((g, out))
            logits = wanted.logits(out)[0]
            torch.testing.assert_close(found[step, place], logits, rtol=5e-5, atol=5e-5)


@pytest.mark.parametrize(("bias", "layers"), [(True, 1), (False, 2)])
@torch.no_grad()
def test_a_head_of_eagle_1(bias: bool, layers: int, tmp_path: Path) -> None:
    """Its logits are the target's output matrix times what it puts out."""
    head = FirstHead(bias, num_hidden_layers=layers)
    heads = read(save_head(tmp_path, head.tensors(), draft_vocab_size=None))
    assert not heads.taps and heads.biases == (("fc",) if bias else ())
    features, text, table, projection = random_text()
    found = steps_of(heads, projection, table, features[:, :HIDDEN], text)
    for place in PLACES:
        g = features[: place + 1, :HIDDEN]
        for step in range(STEPS):
            out = head(g, table[text[: place + 1 + step]])[-1:]
            g = torch.cat((g, out))
            wanted = (out @ projection.T)[0]
            torch.testing.assert_close(found[step, place], wanted, rtol=5e-5, atol=5e-5)
