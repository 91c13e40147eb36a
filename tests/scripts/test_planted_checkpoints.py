"""Planted checkpoints say what they were made to say, alone and with a draft."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoConfig

from llmctl.builder.build import plan_build
from llmctl.builder.config import BuildRequest
from llmctl.builder.planted import LoadFormat
from llmctl.cli.main import execute
from llmctl.errors import BadConfig, OutputExists
from llmctl.quantize.schemes.mxfp4 import expand
from llmctl.runtime.engines.planted_weights import next_tokens, planted_text
from scripts.models import make_planted_checkpoints as planted
from scripts.models.make_planted_checkpoints import Recipe, write_checkpoint
from scripts.models.planted_shapes import SHAPES

ACCEPTANCE = 0.8
DRAFT_LEN = 4
NUM_TOKENS = 200
PROMPTS = [[17], [900, 3, 41], [2048] * 40, [4095], [2], [5, 6], [77, 78], [1234]]


def recipe_of(folder: Path) -> dict[str, Any]:
    recipe: dict[str, Any] = json.loads((folder / "config.json").read_text())["planted"]
    return recipe


FORMATS = {
    "fp8": ("fp8", False),
    "fp8 with its head": ("fp8", True),
    "mxfp4": ("w4a8_mxfp4_fp8", False),
    "mxfp4 with its head": ("w4a8_mxfp4_fp8", True),
    "bf16": (None, False),
}


@pytest.fixture(scope="module", params=FORMATS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoints and engines of a tiny pair."""
    folder = tmp_path_factory.mktemp("planted")
    tokenizer = planted.REPOSITORY / "examples/demo-target"
    for role in ("target", "draft"):
        recipe = Recipe("tiny", role, ACCEPTANCE, 11, *FORMATS[request.param])
        write_checkpoint(folder / role, recipe, tokenizer_dir=tokenizer)
        limits = ["--max-seq-len", "512", "--max-batch-size", "8", "--max-num-tokens", "256"]
        limits += ["--max-draft-len", str(DRAFT_LEN)] if role == "target" else []
        build = ["build", "--backend", "cpu", "--checkpoint-dir", str(folder / role)]
        engine = str(folder / f"{role}-engine")
        assert execute([*build, "--output-dir", engine, *limits, "--log-level", "error"]) == 0
    return folder


def generate(folder: Path, capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    """The JSON of one run over PROMPTS."""
    prompts = folder / "prompts.csv"
    prompts.write_text("".join(f"{','.join(map(str, ids))}\n" for ids in PROMPTS))
    capsys.readouterr()
    base = ["run", "--engine-dir", str(folder / "target-engine"), "--input-file", str(prompts)]
    assert execute([*base, "--max-output-len", str(NUM_TOKENS), "--json", *options]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def test_a_seed_gives_the_same_weights_however_many_write_them(tmp_path, monkeypatch) -> None:
    recipe = Recipe("tiny", seed=5)
    write_checkpoint(tmp_path / "many", recipe)
    monkeypatch.setattr(planted, "MOST_WRITERS", 1)
    write_checkpoint(tmp_path / "one", recipe)
    names = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert "layer-001.safetensors" in names and "outer.safetensors" in names
    for name in names:
        assert (tmp_path / "many" / name).read_bytes() == (tmp_path / "one" / name).read_bytes()
    layers = [load_file(tmp_path / "one" / f"layer-00{index}.safetensors") for index in (0, 1)]
    weights = [
        layer[f"model.layers.{index}.mlp.up_proj.weight"] for index, layer in enumerate(layers)
    ]
    assert not torch.equal(*(weight.view(torch.uint8) for weight in weights))


def test_greedy_text_is_the_planted_one_with_and_without_a_draft(pair, capsys) -> None:
    recipe = recipe_of(pair / "target")
    wanted = [planted_text(recipe, prompt[-1], NUM_TOKENS) for prompt in PROMPTS]
    plain = generate(pair, capsys)
    assert [output["token_ids"] for output in plain["outputs"]] == wanted
    drafted = generate(pair, capsys, "--draft-engine", str(pair / "draft-engine"))
    assert [output["token_ids"] for output in drafted["outputs"]] == wanted
    # How often a draft was right where the ones before it were: p, whatever the draft length.
    shares = drafted["stats"]["speculation"]["accepted_at_position"]
    measured = sum(shares) / (1 + sum(shares[:-1]))
    assert measured == pytest.approx(ACCEPTANCE, abs=0.04)


def test_a_draft_agrees_with_its_target_at_the_given_share_of_tokens() -> None:
    recipe = {"seed": 3, "ordinary_tokens": [2, 100_000], "acceptance": 0.873}
    target = next_tokens({**recipe, "role": "target"})[2:]
    draft = next_tokens({**recipe, "role": "draft"})[2:]
    assert (target == draft).mean() == pytest.approx(0.873, abs=0.005)
    assert sorted(draft) == sorted(target) == list(range(2, 100_000))
    # independent of each other: after a right token, the next is right as often as any
    right = (target == draft)[target[target == draft] - 2]
    assert right.mean() == pytest.approx(0.873, abs=0.005)


def test_the_planted_text_visits_every_ordinary_token_before_one_comes_again(tmp_path) -> None:
    write_checkpoint(tmp_path / "target", Recipe("tiny", seed=4), config_only=True)
    recipe = recipe_of(tmp_path / "target")
    first, stop = recipe["ordinary_tokens"]
    text = planted_text(recipe, first, stop - first)
    assert (first, stop) == (2, 4096) and sorted(text) == list(range(first, stop))
    other = planted_text({**recipe, "seed": 5}, first, stop - first)
    assert np.mean(np.array(text) == np.array(other)) < 0.01


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("quantization", ["fp8", "w4a8_mxfp4_fp8", None])
def test_config_files_alone_are_enough_for_a_generated_engine(
    shape, quantization, tmp_path
) -> None:
    recipe = Recipe(shape, "draft", 0.5, seed=9, quantization=quantization)
    write_checkpoint(tmp_path / "draft", recipe, config_only=True)
    found = {path.name for path in (tmp_path / "draft").iterdir()}
    assert found == {"config.json"} | ({"hf_quant_config.json"} if quantization else set())
    engine = plan_build(
        tmp_path / "draft",
        BuildRequest(max_seq_len=1024, max_num_tokens=64),
        backend="cuda",
        load_format=LoadFormat("planted", 9, "draft", 0.5),
        with_binaries=False,
    )
    weights = dict(engine.config.weights)
    assert weights.pop("load_format") == "planted" and weights == recipe_of(tmp_path / "draft")
    assert engine.plan.kv_cache.dtype == ("float8_e4m3fn" if quantization else "bfloat16")
    # norms, scales and the rotary table are all that is not counted
    found_bytes = engine.summary()["weight_bytes"]
    assert planted.num_bytes(recipe) == pytest.approx(
        found_bytes, rel=0.12 if shape == "tiny" else 2e-3
    )


def test_shapes_are_those_of_llama(tmp_path) -> None:
    """Parameters as published, with the head of 1B and 3B counted once (it is tied there)."""
    wanted = {"1b": 1.236e9, "3b": 3.213e9, "8b": 8.030e9, "70b": 70.554e9}
    for name, count in wanted.items():
        shape = SHAPES[name]
        linears = sum(rows * columns for rows, columns in shape.linears().values())
        tables = shape.vocab * shape.hidden * (1 if name in ("1b", "3b") else 2)
        norms = (2 * shape.layers + 1) * shape.hidden
        assert shape.layers * linears + tables + norms == pytest.approx(count, rel=1e-3)
        write_checkpoint(tmp_path / name, Recipe(name, quantization=None), config_only=True)
        config = AutoConfig.from_pretrained(tmp_path / name)
        assert config.rope_parameters["rope_type"] == "llama3"
        assert config.num_attention_heads * config.head_dim == config.hidden_size


def test_layers_move_no_code(pair) -> None:
    """The outputs of attention and MLP stay below half a unit in the last place of BF16 at 1."""
    for path in sorted((pair / "target").glob("layer-*.safetensors")):
        with safe_open(path, "pt") as shard:
            names = shard.keys()
            for name in names:
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    weight, scale_name = shard.get_tensor(name), name + "_scale"
                    if weight.dtype == torch.uint8:
                        weight = expand(weight, shard.get_tensor(scale_name))
                    elif scale_name in names:
                        weight = weight.float() * shard.get_tensor(scale_name)
                    weight = weight.float()
                    assert 0 < weight.norm(dim=1).max() * 8 < 2**-9  # inputs of 8 are rare


def test_the_command_writes_both_folders_and_overwrites_none(tmp_path, monkeypatch, capsys) -> None:
    command = ["make", str(tmp_path / "out"), "--target", "70b", "--draft", "1b", "--config-only"]
    monkeypatch.setattr(sys, "argv", command)
    planted.main()
    roles = [recipe_of(tmp_path / "out" / role)["role"] for role in ("target", "draft")]
    assert roles == ["target", "draft"]
    with pytest.raises(OutputExists):
        planted.main()
    monkeypatch.setattr(sys, "argv", command[:2])
    with pytest.raises(SystemExit):
        planted.main()
    assert "nothing to write" in capsys.readouterr().err


def test_an_impossible_acceptance_is_refused() -> None:
    with pytest.raises(BadConfig, match="must be in"):
        Recipe("tiny", acceptance=1.5)
