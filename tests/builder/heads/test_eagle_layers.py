"""The layers of an EAGLE head: how many there are, and how far each sees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.eagle import make_head, save_head
from support.eagle_first import FirstHead
from support.hostile_engine import HostileEngine

from llmctl.builder.build import plan_build, run_build
from llmctl.builder.config import BuildRequest
from llmctl.builder.engine_format import EAGLE_NEXT, open_engine, read_engine_config
from llmctl.builder.heads.eagle.checkpoint import EagleHead, check_head, open_head
from llmctl.builder.heads.eagle.mode import describe
from llmctl.errors import (
    CorruptEngine,
    CorruptFile,
    MissingTensor,
    UnexpectedTensor,
    Unsupported,
)

SLIDING, FULL = "sliding_attention", "full_attention"


def check(folder: Path, taps: tuple[int, ...] = (2, 4, 5)) -> EagleHead:
    return check_head(open_head(folder), taps, 64, 131)


def with_head(folder: Path) -> BuildRequest:
    return BuildRequest(
        speculative_decoding_mode="eagle",
        eagle_layers="0,1,1",
        max_batch_size=2,
        max_seq_len=64,
        draft_model_dir=str(folder),
    )


def test_the_tensors_say_how_many_layers_there_are(tmp_path: Path) -> None:
    """Where they have numbers, config.json must agree; EAGLE's name of its only one says it all."""
    for layers in (1, 2, 3):
        for stated in ({}, {"num_hidden_layers": layers}):
            folder = save_head(
                tmp_path / f"{layers}{len(stated)}",
                make_head(layers=layers),
                "speculators",
                **stated,
            )
            assert check(folder).windows == (0,) * layers
    folder = save_head(tmp_path / "eagle", make_head(), num_hidden_layers=32)
    assert check(folder).windows == (0,)
    first = FirstHead(True, num_hidden_layers=2)
    folder = save_head(tmp_path / "first", first.tensors(), draft_vocab_size=None)
    assert check(folder, (2,)).windows == (0, 0)


def test_layers_that_are_lost_or_too_many_are_refused(tmp_path: Path) -> None:
    tensors = make_head(layers=3)
    save_head(tmp_path, tensors, "speculators", num_hidden_layers=4)
    with pytest.raises(MissingTensor, match="the layers 0, 1, 2; config.json implies 0 to 3"):
        check(tmp_path)
    save_head(tmp_path, tensors, "speculators", num_hidden_layers=2)
    with pytest.raises(UnexpectedTensor, match="config.json implies 0 to 1"):
        check(tmp_path)
    gap = {name: t for name, t in tensors.items() if not name.startswith("layers.1.")}
    with pytest.raises(MissingTensor, match="the layers 0, 2; config.json implies 0 to 1"):
        check(save_head(tmp_path, gap, "speculators"))
    with pytest.raises(MissingTensor, match="it is no EAGLE head"):
        check(save_head(tmp_path, {"layers.1.mlp.up_proj.weight": torch.ones(96, 64)}))
    with pytest.raises(Unsupported, match="65 layers; heads of up to 64"):
        most = {f"layers.{layer}.mlp.up_proj.weight": torch.ones(96, 64) for layer in range(65)}
        check(save_head(tmp_path, most))


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("layers.1.input_layernorm.weight", MissingTensor),
        ("layers.1.self_attn.q_norm.weight", MissingTensor),
        ("layers.1.hidden_norm.weight", UnexpectedTensor),
    ],
)
def test_layers_behind_the_first_are_those_of_any_decoder(
    tmp_path: Path, name: str, error: type[Exception]
) -> None:
    tensors = make_head(layers=2, qk_norm=True)
    if name in tensors:
        del tensors[name]
    else:
        tensors[name] = torch.ones(64)
    with pytest.raises(error, match=name):
        check(save_head(tmp_path, tensors))


def test_how_far_layers_see_is_what_their_types_say(tmp_path: Path) -> None:
    """`speculators` trains layers with windows unless it is told otherwise."""

    def windows(kinds: list[str] | None, size: int | None) -> tuple[int, ...]:
        fields: dict[str, Any] = {"layer_types": kinds, "sliding_window": size}
        return check(save_head(tmp_path, make_head(layers=2), "speculators", **fields)).windows

    assert windows(None, 2048) == windows([FULL] * 36, None) == (0, 0)
    assert windows([SLIDING, FULL], 2048) == (2048, 0)
    for kinds, size in (([SLIDING], 8), ([SLIDING, FULL], None), ([SLIDING, SLIDING], 0)):
        with pytest.raises(CorruptFile, match="one type a layer and the size of the windows"):
            windows(kinds, size)
    copied = save_head(tmp_path, make_head(), sliding_window=128, layer_types=[SLIDING, FULL] * 18)
    assert check(copied).windows == (0,), "of the target; EAGLE's code reads none"


@pytest.fixture
def engine(new_model: Any, save: Any, tmp_path: Path) -> Path:
    """The head's first layer sees 5 tokens, its second as many as the target, 9."""
    model = new_model("mistral", sliding_window=9)
    kinds = {"sliding_window": 5, "layer_types": [SLIDING, FULL]}
    head = save_head(tmp_path / "head", make_head(layers=2), **kinds)
    folder = tmp_path / "engine"
    run_build(plan_build(save(model), with_head(head), backend="cpu"), folder)
    return folder


def test_no_layer_sees_further_than_the_target(engine: Path) -> None:
    plan, _ = open_engine(engine)
    assert plan.head_caches["eagle"].windows == (5, 9)
    facts = read_engine_config(engine).build_config["draft_heads"]
    assert facts["windows"] == [5, 0]
    assert "2 layers, windows of 5, all tokens, vocabulary" in describe(facts)
    del facts["windows"]
    assert "width 64, vocabulary" in describe(facts)


@pytest.mark.parametrize("windows", [[], "0", [0, -1], [0, 1.5], [True], [0] * 65])
def test_windows_that_no_build_writes_are_refused(
    engine: Path, tmp_path: Path, windows: object
) -> None:
    edited = HostileEngine.read(engine)
    edited.config["build_config"]["draft_heads"]["windows"] = windows
    with pytest.raises(CorruptEngine, match=r"draft_heads\.windows is"):
        read_engine_config(edited.write(tmp_path / "edited"))


def test_a_plan_of_other_layers_than_config_json_says_is_refused(
    engine: Path, tmp_path: Path
) -> None:
    for number, windows in enumerate(([0], [0, 0, 0], None)):
        edited = HostileEngine.read(engine)
        facts = edited.config["build_config"]["draft_heads"]
        del facts["windows"]
        if windows is not None:
            facts["windows"] = windows
        with pytest.raises(CorruptEngine, match=r"layers, heads and size \(2, 2, 16\)"):
            open_engine(edited.write(tmp_path / f"edited-{number}"))


def test_each_layer_is_as_few_operators_for_a_gpu_as_the_targets(
    new_model: Any, save: Any, tmp_path: Path
) -> None:
    checkpoint = save(new_model("llama", head_dim=64, dtype="bfloat16"))
    head = save_head(tmp_path / "head", make_head(head_dim=64, layers=3), head_dim=64)
    plan = plan_build(checkpoint, with_head(head), backend="cuda", with_binaries=False).plan
    layer = ["rms_norm", "packed_linear_rope_kv", "paged_attention", "packed_linear",
             "rms_norm", "packed_linear_swiglu", "packed_linear"]  # fmt: skip
    assert [op.op for op in plan.heads[EAGLE_NEXT].ops] == [
        *("embedding", "rms_norm", "rms_norm", "concat", *layer[1:]),
        *(*layer, *layer, "rms_norm", "packed_linear", "expand_logits"),
    ]
