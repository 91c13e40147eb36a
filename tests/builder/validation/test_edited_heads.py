"""Edited plans with heads: what would read or overwrite another graph's memory is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.heads import MODE, ROW, TorchHeads
from support.hostile_engine import HostileEngine

from llmctl.builder.engine_format import open_engine
from llmctl.builder.speculative_modes import SPECULATIVE_MODES
from llmctl.errors import CorruptEngine


def op_of(engine: HostileEngine, head: str, op: str) -> dict[str, Any]:
    (found,) = [each for each in engine.plan["heads"][head]["ops"] if each["op"] == op]
    return found


def read_what_the_base_has(engine: HostileEngine) -> None:
    embedded = engine.op("model.embed_tokens")["outputs"]["out"]
    op_of(engine, "recurrent", "silu")["inputs"]["x"] = embedded


def take_in_what_a_head_has(engine: HostileEngine) -> None:
    inner = op_of(engine, "medusa", "silu")["outputs"]["out"]
    engine.plan["heads"]["recurrent"]["inputs"]["state"] = inner


def put_a_state_on_logits(engine: HostileEngine) -> None:
    place = engine.tensor(engine.plan["outputs"]["logits"])["offset"]
    engine.tensor("recurrent.state")["offset"] = place


def put_what_a_head_computes_on_a_state(engine: HostileEngine) -> None:
    engine.tensor("medusa.linear.out")["offset"] = engine.tensor("recurrent.state")["offset"]


def activate_in_the_base(engine: HostileEngine) -> None:
    norm = engine.op("layers.0.input_layernorm")
    weight = norm["inputs"].pop("weight")
    engine.plan["tensors"].remove(engine.tensor(weight))
    norm.update(op="silu", attributes={}, tactic="cpu.silu.fp32")


EDITS = {
    "neither its own nor an input": read_what_the_base_has,
    "which is no output of another graph": take_in_what_a_head_has,
    "shares bytes of the arena|arena_bytes": put_a_state_on_logits,
    "is still needed|arena_bytes": put_what_a_head_computes_on_a_state,
    "a head is called 'base'": lambda e: e.plan["heads"].update(base=e.plan["heads"]["medusa"]),
    "which no operator writes in 'medusa'": lambda e: e.plan["heads"]["medusa"]["outputs"].update(
        logits="lm_head.out"
    ),
    "which is no activation": lambda e: e.plan["heads"]["medusa"]["inputs"].update(
        hidden="lm_head.weight"
    ),
    "needs a KV cache": lambda e: op_of(e, "medusa", "silu")["attributes"].update(layer=0),
    "head 'medusa' has no operators": lambda e: e.plan["heads"]["medusa"].update(
        ops=[], outputs={}
    ),
    "is a silu, which no decoder has": activate_in_the_base,
    r"plan.heads\['medusa'\]": lambda e: e.plan["heads"]["medusa"].update(inputs=["hidden"]),
}


@pytest.fixture
def folder(new_model, save, build_engine, monkeypatch) -> Path:
    monkeypatch.setitem(SPECULATIVE_MODES, MODE, ROW)
    model = new_model("llama", head_dim=64)
    checkpoint = TorchHeads(model, 64).add_to(save(model))
    return Path(build_engine(checkpoint, speculative_decoding_mode=MODE))


def test_a_head_that_was_edited_is_refused(folder, tmp_path):
    for number, (what, change) in enumerate(EDITS.items()):
        engine = HostileEngine.read(folder)
        change(engine)
        with pytest.raises(CorruptEngine, match=what):
            open_engine(engine.write(tmp_path / f"edited{number}"))
