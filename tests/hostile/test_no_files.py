"""Folders, pipes, devices and links in the place of files: named for what they are, never taken for
missing, and never waited for."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.hostile import attempt, build, require_named, run

PLACED: dict[str, Callable[[Path], object]] = {
    "is a folder": Path.mkdir,
    "is a pipe": os.mkfifo,
    "is a device": lambda path: path.symlink_to("/dev/zero"),
    "is a link to ../blobs/0af3, which does not exist": lambda path: path.symlink_to(
        "../blobs/0af3"
    ),
    "is a link that leads to itself": lambda path: path.symlink_to(path.name),
    "is a Git LFS pointer (git lfs pull fetches what it stands for)": lambda path: path.write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
    ),
}
CHECKPOINT = (
    "config.json",
    "hf_quant_config.json",
    "generation_config.json",
    "llmctl_quantize.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
)
ENGINE = {
    "config.json": "CorruptEngine",
    "rank0.engine": "CorruptEngine",
    "tokenizer/tokenizer.json": "TokenizerError",
    "tokenizer/tokenizer_config.json": "TokenizerError",
}


def place(path: Path, what: str) -> None:
    path.unlink(missing_ok=True)
    PLACED[what](path)


@pytest.mark.parametrize("name", CHECKPOINT)
def test_a_folder_in_the_place_of_a_file_of_a_checkpoint(
    checkpoint: Path, tmp_path: Path, name: str
) -> None:
    place(checkpoint / name, "is a folder")
    outcome = build(checkpoint, tmp_path / "engine")
    require_named(outcome, "CorruptFile")
    assert f"{checkpoint / name} is a folder; a file is wanted" in outcome.message


@pytest.mark.parametrize("what", PLACED)
@pytest.mark.parametrize("name", ["model.safetensors", "generation_config.json"])
def test_what_is_no_file_of_a_checkpoint(
    checkpoint: Path, tmp_path: Path, name: str, what: str
) -> None:
    place(checkpoint / name, what)
    outcome = build(checkpoint, tmp_path / "engine")
    require_named(outcome, "CorruptFile")
    assert f"{checkpoint / name} {what}; a file is wanted" in outcome.message and outcome.fix


@pytest.mark.parametrize("what", PLACED)
@pytest.mark.parametrize("name", ENGINE)
def test_what_is_no_file_of_an_engine(sound: Any, tmp_path: Path, name: str, what: str) -> None:
    engine = tmp_path / "engine"
    shutil.copytree(sound.engine, engine)
    place(engine / name, what)
    outcome = run(engine, "--input-text", "x")
    require_named(outcome, ENGINE[name])
    assert f"{engine / name} {what}" in outcome.message and outcome.fix


@pytest.mark.parametrize("what", PLACED)
def test_what_is_no_file_of_options(sound: Any, tmp_path: Path, what: str) -> None:
    path = tmp_path / "x.txt"
    place(path, what)
    reads = ("run", "--engine-dir", sound.engine, "--max-output-len", 2, "--json")
    builds = ("build", "--checkpoint-dir", sound.checkpoint, "--output-dir", tmp_path / "new")
    for command in (
        (*reads, "--input-file", path),
        (*reads, "--config", path),
        (*builds, "--json", "--build-config", path),
        ("quantize", "--model-dir", sound.checkpoint, "--output-dir", tmp_path / "new", "--json",
         "--calib-dataset", path),
    ):  # fmt: skip
        outcome = attempt(*command)
        require_named(outcome, "BadConfig", "BadCalibrationData")
        assert f"{path} {what}" in outcome.message
