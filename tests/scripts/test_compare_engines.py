"""The script that tells whether two trees build the same engines."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from llmctl.builder.engine_format import CONFIG_FILE, engine_file
from scripts.compare.engines import main


@pytest.fixture
def pair(demo_engine, tmp_path):
    """A folder with an engine, and a copy of the folder."""
    for name in ("old", "new"):
        shutil.copytree(demo_engine, tmp_path / name / "engine")
    return tmp_path / "old", tmp_path / "new"


@pytest.fixture(scope="session")
def demo_engine(repository, tmp_path_factory, forked_program):
    folder = tmp_path_factory.mktemp("compare") / "engine"
    build = ["build", "--backend", "cpu", "--checkpoint-dir", repository / "examples/demo-draft"]
    words = [*forked_program.command, *map(str, build), "--output-dir", str(folder)]
    subprocess.run(words, capture_output=True, check=True)
    return folder


def edit(folder, change) -> None:
    """Let `change` alter the engine's tensors and its plan."""
    path = folder / "engine" / engine_file(0)
    with safe_open(str(path), "pt") as file:
        metadata = file.metadata()
    tensors, plan = load_file(path), json.loads(metadata["plan"])
    change(tensors, plan)
    save_file(tensors, path, {**metadata, "plan": json.dumps(plan)})


def test_equal_engines_of_other_provenance_are_equal(pair, capsys):
    config = pair[1] / "engine" / CONFIG_FILE
    found = json.loads(config.read_text())
    config.write_text(json.dumps({**found, "command": "another", "versions": {}}))
    assert main([str(folder) for folder in pair]) == 0
    assert capsys.readouterr().out == "1 engines, 0 differences\n"


def test_a_changed_weight_operator_or_limit_is_named(pair, capsys):
    def change(tensors, plan):
        name = min(tensors, key=lambda key: tensors[key].numel())
        tensors[name] = tensors[name] * 2 + 1
        plan["arena_bytes"] += 64

    edit(pair[1], change)
    config = pair[1] / "engine" / CONFIG_FILE
    config.write_text(config.read_text().replace('"max_batch_size": 8', '"max_batch_size": 9'))
    assert main([str(folder) for folder in pair]) == 1
    said = capsys.readouterr().out
    assert "plan arena_bytes" in said and "max_batch_size: 8 -> 9" in said and "tensor " in said


def test_an_engine_that_is_missing_is_named(pair, capsys):
    shutil.copytree(pair[1] / "engine", pair[1] / "another")
    assert main([str(folder) for folder in pair]) == 1
    assert "another: only in" in capsys.readouterr().out
