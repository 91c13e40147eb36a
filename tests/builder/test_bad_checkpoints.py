"""Checkpoints nobody should build: each defect has its name, and nothing is left behind."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.bad_checkpoints import (
    Tensors,
    build,
    configure,
    drop,
    put,
    refuse,
)
from support.checkpoint import edit

from llmctl.errors import (
    BadTensorShape,
    BadTensorValue,
    CheckpointNotFound,
    CorruptFile,
    MissingTensor,
    PickleCheckpoint,
    UnknownArchitecture,
    UnsafePath,
)


def spoil(name: str, value: float) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        flat = tensors[name].reshape(-1)
        flat[len(flat) // 2] = value
        tensors[name] = flat.view(tensors[name].shape)

    return change


def test_the_hand_made_fp8_checkpoint_builds(quantized: Path) -> None:
    assert (build(quantized) / "rank0.engine").is_file()


def test_no_checkpoint(tmp_path: Path) -> None:
    refuse(tmp_path / "nowhere", CheckpointNotFound, "config.json does not exist")


def test_a_truncated_file(plain: Path) -> None:
    path = plain / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    refuse(plain, CorruptFile, "not a whole safetensors file")


def test_a_file_of_the_folder(plain: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        refuse(plain / name, CheckpointNotFound, f"{name} is a file; a folder")


def test_only_pickles(plain: Path) -> None:
    (plain / "model.safetensors").rename(plain / "pytorch_model.bin")
    refuse(plain, PickleCheckpoint, "never unpickles")


def test_an_index_that_leaves_its_folder(plain: Path) -> None:
    (plain / "model.safetensors").rename(plain.parent / "outside.safetensors")
    index = {"weight_map": {"lm_head.weight": "../outside.safetensors"}}
    (plain / "model.safetensors.index.json").write_text(json.dumps(index))
    refuse(plain, UnsafePath, "outside")


def test_an_unknown_architecture(plain: Path) -> None:
    configure(plain, architectures=["GPT2LMHeadModel"])
    refuse(plain, UnknownArchitecture, "GPT2LMHeadModel")


def test_a_missing_tensor_is_named(plain: Path) -> None:
    refuse(edit(plain, drop("model.norm.weight")), MissingTensor, "model.norm.weight")


def test_an_untied_model_without_its_head(plain: Path) -> None:
    refuse(edit(plain, drop("lm_head.weight")), MissingTensor, "lm_head.weight")


def test_a_misshapen_tensor(plain: Path) -> None:
    change = put("model.norm.weight", torch.ones(65))
    refuse(edit(plain, change), BadTensorShape, r"model.norm.weight .*\[65\].*\[64\]")


def test_a_config_of_another_size(plain: Path) -> None:
    refuse(configure(plain, intermediate_size=96), BadTensorShape, r"implies \[96, 64\]")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_weight_that_is_not_finite(plain: Path, value: float) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    refuse(edit(plain, spoil(name, value)), BadTensorValue, f"{name} holds NaN or infinity")


def test_a_weight_that_does_not_fit_the_wanted_dtype(plain: Path) -> None:
    change = spoil("lm_head.weight", 1e6)
    refuse(edit(plain, change), BadTensorValue, "do not fit float16", dtype="float16")


def test_an_integer_weight(plain: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    change = put(name, torch.zeros(112, 64, dtype=torch.int8))
    refuse(edit(plain, change), BadTensorShape, "is I8")
