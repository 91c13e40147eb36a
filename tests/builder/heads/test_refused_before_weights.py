"""Heads that do not fit are refused by name before a weight is read: by `build` of checkpoints that
cannot be read, and by `run` of engines whose weights are gone."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import save_file
from support import eagle, medusa, redrafter

from llmctl.cli.endings import EXIT_BUG
from llmctl.cli.main import execute
from llmctl.quantize.checkpoint import Checkpoint

HIDDEN, VOCAB = 64, 131  # of tiny targets


def lacks(tensors: dict, name: str) -> dict:
    return {key: tensor for key, tensor in tensors.items() if key != name}


def of_medusa(folder: Path, *, hidden: int = HIDDEN, vocab: int = VOCAB, lacking: str = "") -> None:
    medusa.save_heads(folder, lacks(medusa.make_heads(2, 1, hidden, vocab), lacking))


def of_redrafter(
    folder: Path, *, hidden: int = HIDDEN, vocab: int = VOCAB, lacking: str = ""
) -> None:
    tensors = redrafter.make_head(hidden, vocab)
    redrafter.save_head(folder, tensors)
    save_file(lacks(tensors, lacking), folder / "model.safetensors")


def of_eagle(folder: Path, *, hidden: int = HIDDEN, vocab: int = VOCAB, lacking: str = "") -> None:
    sizes = {"hidden_size": hidden, "vocab_size": vocab, "draft_vocab_size": vocab}
    tensors = eagle.make_head(target_hidden=hidden, **sizes)
    eagle.save_head(folder, lacks(tensors, lacking), **sizes)


HEADS: dict[str, Callable[..., None]] = {
    "medusa": of_medusa, "redrafter": of_redrafter, "eagle": of_eagle,
}  # fmt: skip
OPTIONS = {"eagle": ["--eagle_layers", "0,1,1"]}
BUILDS = [
    ("medusa", {"hidden": 32}, [], "PairMismatch", "hidden_size 32, the target has 64"),
    ("medusa", {"vocab": 130}, [], "PairMismatch", "vocab_size 130, the target has 131"),
    ("medusa", {"lacking": "1.1.weight"}, [], "MissingTensor", "lacks 1 of the 6 tensors"),
    ("medusa", {}, ["--medusa_choices", "[[0,0,0]]"], "BadConfig", "a path of 3 tokens; 2 heads"),
    ("redrafter", {"hidden": 32}, [], "PairMismatch", "hidden_size 32, the target has 64"),
    ("redrafter", {"vocab": 130}, [], "PairMismatch", "vocab_size 130, the target has 131"),
    ("redrafter", {"lacking": "rnn_u.bias"}, [], "MissingTensor", "rnn_u.bias"),
    ("redrafter", {}, ["--redrafter_draft_len_per_beam", "400"], "BadConfig", "at most 1024"),
    ("redrafter", {}, ["--max_draft_len", "24"], "BadConfig", "are 25 drafts per round"),
    ("eagle", {"hidden": 32}, [], "PairMismatch", "the target wants 64"),
    ("eagle", {"vocab": 130}, [], "PairMismatch", "vocab_size 130; the target wants 131"),
    ("eagle", {"lacking": "norm.weight"}, [], "MissingTensor", "norm.weight"),
]


@pytest.mark.parametrize(("mode", "head", "options", "name", "found"), BUILDS)
def test_build_reads_no_weight_of_what_does_not_fit(
    new_model, save, tmp_path, monkeypatch, capsys, mode, head, options, name, found
):
    target = save(new_model("llama"))
    HEADS[mode](tmp_path / "head", **head)
    monkeypatch.setattr(Checkpoint, "_map", unreadable)
    command = build_command(target, tmp_path, mode, *options)
    assert execute(command) in (1, 2)
    told = capsys.readouterr().err
    assert told.startswith(f"error[{name}]") and found in told and "\nfix: " in told, told


def unreadable(checkpoint: Checkpoint, path: Path) -> None:
    raise AssertionError(f"a weight of {path} is read")


def test_a_build_that_fits_does_read_weights(new_model, save, tmp_path, monkeypatch, capsys):
    """So that the test above would see it."""
    target = save(new_model("llama"))
    HEADS["medusa"](tmp_path / "head")
    monkeypatch.setattr(Checkpoint, "_map", unreadable)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # of the traceback that is kept
    assert execute(build_command(target, tmp_path, "medusa")) == EXIT_BUG
    assert "is read" in capsys.readouterr().err


RUNS = [
    ("medusa", ["--medusa-choices", "[[0,0,0]]"], "a path of 3 tokens; the engine has 2"),
    ("medusa", ["--medusa-choices", "[[0],[1],[2],[3],[4],[5],[6],[7],[8]]"], "9 drafts per round"),
    ("redrafter", ["--redrafter-num-beams", "4"], "the engine was built for 3"),
    ("redrafter", ["--redrafter-draft-len-per-beam", "3"], "the engine was built for 2"),
    ("redrafter", ["--redrafter-num-beams", "2", "--draft-len", "5"], "5 drafts per round"),
    ("eagle", ["--eagle-choices", "auto", "--draft-len", "6"], "6 drafts per round"),
    ("eagle", ["--medusa-choices", "auto"], "the engine has no Medusa heads"),
]


@pytest.mark.parametrize(("mode", "options", "found"), RUNS)
def test_run_reads_no_weight_for_drafts_that_the_engine_has_no_room_for(
    new_model, save, tmp_path, capsys, mode, options, found
):
    HEADS[mode](tmp_path / "head")
    limits = {
        "medusa": ["--max_draft_len", "8"],
        "redrafter": ["--redrafter_num_beams", "3", "--redrafter_draft_len_per_beam", "2"],
        "eagle": [],
    }
    command = build_command(save(new_model("llama")), tmp_path, mode, *limits[mode])
    assert execute(command) == 0
    (tmp_path / "engine" / "rank0.engine").unlink()
    capsys.readouterr()
    run = ["run", "--engine-dir", str(tmp_path / "engine"), "--max-output-len", "4", *options]
    assert execute(run) == 1
    told = capsys.readouterr().err
    assert told.startswith("error[PairMismatch]") and found in told and "\nfix: " in told, told


def build_command(target: Path, folder: Path, mode: str, *options: str) -> list[str]:
    """Of the head in `folder`, to `folder`/engine."""
    command = ["build", "--backend", "cpu", "--checkpoint-dir", str(target)]
    command += ["--output-dir", str(folder / "engine"), "--max-batch-size", "2"]
    command += ["--speculative-decoding-mode", mode, "--draft-model-dir", str(folder / "head")]
    return [*command, *OPTIONS.get(mode, []), *options]


OTHERS = [  # (mode, kind of the head that is given, what is said)
    ("eagle", "redrafter", "it is no EAGLE head\nfix: give the folder of an EAGLE-3 head"),
    ("redrafter", "medusa", "has no model.safetensors\nfix: give the folder of a ReDrafter head"),
    ("redrafter", "eagle", "which no ReDrafter head has"),
    ("medusa", "redrafter", "which no Medusa head has"),
    ("medusa", "eagle", "which no Medusa head has"),
    ("eagle", "medusa", "has no model.safetensors"),
]


@pytest.mark.parametrize(("mode", "given", "found"), OTHERS)
def test_a_head_of_another_kind_is_called_so(new_model, save, tmp_path, capsys, mode, given, found):
    HEADS[given](tmp_path / "head")
    assert execute(build_command(save(new_model("llama")), tmp_path, mode)) == 1
    told = capsys.readouterr().err
    assert found in told, told
