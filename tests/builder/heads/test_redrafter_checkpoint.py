"""Published ReDrafter heads: what is read, and what is refused before a weight is read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.redrafter import converted, make_head, save_converted, save_head

from llmctl.builder.heads.redrafter.checkpoint import open_head, require_fit
from llmctl.errors import (
    BadConfig,
    BadTensorShape,
    CheckpointNotFound,
    CorruptFile,
    MissingTensor,
    PairMismatch,
    UnexpectedTensor,
    Unsupported,
)
from llmctl.quantize.checkpoint import Checkpoint
from llmctl.quantize.format import QuantizationInfo

HIDDEN, VOCAB = 16, 128  # of Apple's own unit tests, which have an exit of 24
TARGET = Checkpoint(Path("target"), {}, {}, None)


def head_of(**fields):
    return make_head(HIDDEN, VOCAB, **fields)


@pytest.mark.parametrize("num_layers", [0, 1, 2, 11])
@pytest.mark.parametrize("exit_dim", [24, 2 * HIDDEN])
@pytest.mark.parametrize("is_rnn", [False, True])
def test_a_head_of_apples_trainer_is_read_by_its_names(tmp_path, num_layers, exit_dim, is_rnn):
    tensors = head_of(num_layers=num_layers, exit_dim=exit_dim, is_rnn=is_rnn)
    head = open_head(save_head(tmp_path, tensors, num_draft_layers=7))
    assert (head.hidden_size, head.vocab_size) == (HIDDEN, VOCAB)
    assert (head.num_layers, head.exit_dim) == (num_layers, exit_dim)
    assert head.recurrence == ("silu" if is_rnn else "sum")
    assert head.num_beams is None and head.draft_len_per_beam is None
    beside = head.beside(TARGET)
    wanted = converted(tensors)
    assert beside.tensors.keys() == wanted.keys() and not TARGET.tensors
    for name, tensor in wanted.items():
        assert torch.equal(beside.read(name), tensor)


@pytest.mark.parametrize("is_rnn", [False, True])
def test_a_converted_head_is_read_with_its_own_recurrence(tmp_path, is_rnn):
    tensors = head_of(exit_dim=24, is_rnn=is_rnn)
    head = open_head(save_converted(tmp_path, tensors))
    assert head.recurrence == ("linear" if is_rnn else "sum")
    assert (head.hidden_size, head.vocab_size, head.exit_dim) == (HIDDEN, VOCAB, 24)
    assert (head.num_layers, head.num_beams, head.draft_len_per_beam) == (2, 3, 2)
    beside = head.beside(TARGET)
    assert beside.tensors.keys() == converted(tensors).keys(), "and none of the target"
    for name, tensor in converted(tensors).items():
        assert torch.equal(beside.read(name), tensor)


@pytest.mark.parametrize(
    ("old", "new"),
    [("input_proj.", "input_projs."), ("lm_head.", "lm_heads."), ("lm_head.", "0.")],
)
def test_older_names_are_read(tmp_path, old, new):
    tensors = head_of(exit_dim=24)
    renamed = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    wanted = open_head(save_head(tmp_path, tensors))
    save_file(renamed, tmp_path / "model.safetensors")
    assert open_head(tmp_path).tensors.keys() == wanted.tensors.keys()


def test_a_norm_that_is_never_applied_is_not_read(tmp_path):
    tensors = {**head_of(), "emb_norm.weight": torch.ones(HIDDEN)}
    assert "emb_norm.weight" not in open_head(save_head(tmp_path, tensors)).tensors


@pytest.mark.parametrize("is_rnn", [False, True])
def test_where_the_config_says_nothing_the_tensors_do(tmp_path, is_rnn):
    tensors = head_of(is_rnn=is_rnn)
    silent = dict.fromkeys(("rnn", "vocab_size", "hidden_size", "exit_dim", "model_type"))
    head = open_head(save_head(tmp_path, tensors, **silent))
    assert head.recurrence == ("silu" if is_rnn else "sum") and head.hidden_size == HIDDEN


def test_a_head_beside_a_quantized_target_is_not_quantized(tmp_path):
    info = QuantizationInfo("modelopt", "FP8", None, ("lm_head",), "tensor", "static")
    head = open_head(save_head(tmp_path, head_of()))
    beside = head.beside(Checkpoint(Path("target"), {}, {}, info)).quantization
    assert beside is not None and beside.excludes("drafter.layers.0.linear")
    assert beside.excludes("lm_head") and not beside.excludes("model.layers.0.mlp.up_proj")


def _half(tensors):
    tensors["rnn_w.weight"] = tensors["rnn_w.weight"].to(torch.float8_e4m3fn)


EDITS = [
    (lambda t: t.pop("rnn_u.bias"), MissingTensor, "lacks 1 of the 8 tensors .* rnn_u.bias"),
    (lambda t: t.pop("rnn_w.weight"), MissingTensor, "lacks rnn_w.weight"),
    (lambda t: t.pop("lm_head.2.weight"), MissingTensor, "lacks lm_head.weight"),
    (lambda t: t.pop("lm_head.1.linear.bias"), MissingTensor, "layers.1.linear.bias"),
    (lambda t: t.pop("lm_head.0.linear.weight"), MissingTensor, "layers.0.linear.weight"),
    (lambda t: t.update({"gate.weight": torch.ones(2)}), UnexpectedTensor, "gate.weight"),
    (lambda t: t.update({"lm_head.7.weight": torch.ones(2)}), UnexpectedTensor, "lm_head.7"),
    (
        lambda t: t.update({"lm_heads.2.weight": torch.ones(2)}),
        UnexpectedTensor,
        "lm_head.*2.weight beside lm_head.*2.weight",
    ),
    (
        lambda t: t.update(
            {"input_proj.weight": torch.ones(32, 32), "input_proj.bias": torch.ones(32)}
        ),
        UnexpectedTensor,
        "input_proj",
    ),
    (lambda t: t.update({"rnn_u.weight": torch.ones(16, 8)}), BadTensorShape, r"\[16, 16\]"),
    (lambda t: t.update({"rnn_w.weight": torch.ones(16)}), BadTensorShape, "rnn_w.weight"),
    (lambda t: t.update({"lm_head.2.weight": torch.ones(0, 32)}), BadTensorShape, r"\[0, 32\]"),
    (_half, Unsupported, "rnn_w.weight in .* is F8_E4M3"),
]


@pytest.mark.parametrize(("change", "error", "found"), EDITS)
def test_heads_that_are_not_whole_are_refused(tmp_path, change, error, found):
    tensors = head_of()
    folder = save_head(tmp_path, tensors)
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(error, match=found):
        open_head(folder)


@pytest.mark.parametrize(
    ("changes", "error", "found"),
    [
        ({"vocab_size": 130}, BadConfig, "says vocab_size 130, the tensors .* have 128"),
        ({"hidden_size": 17}, BadConfig, "says hidden_size 17"),
        ({"exit_dim": 31}, BadConfig, "says exit_dim 31"),
        ({"exit_dim": "32"}, CorruptFile, "exit_dim is '32'"),
        ({"vocab_size": True}, CorruptFile, "vocab_size is True"),
        ({"rnn": False}, UnexpectedTensor, "says rnn false, and the head holds rnn_u.bias"),
        ({"rnn": 1}, CorruptFile, "rnn is 1"),
        ({"model_type": "llama"}, Unsupported, "model_type 'llama'"),
    ],
)
def test_a_config_that_says_otherwise_is_refused(tmp_path, changes, error, found):
    with pytest.raises(error, match=found):
        open_head(save_head(tmp_path, head_of(), **changes))


def test_a_head_without_the_recurrence_that_its_config_promises_is_refused(tmp_path):
    with pytest.raises(MissingTensor, match="lacks rnn_w.weight"):
        open_head(save_head(tmp_path, head_of(is_rnn=False), rnn=True))


def test_a_converted_head_of_several_ranks_is_refused(tmp_path):
    folder = save_converted(tmp_path, head_of())
    (folder / "rank1.safetensors").write_bytes(b"")
    with pytest.raises(Unsupported, match="several ranks"):
        open_head(folder)


def test_a_converted_head_with_an_unknown_part_is_refused(tmp_path):
    tensors = {**head_of(), "rnn_v.weight": torch.ones(2)}
    with pytest.raises(UnexpectedTensor, match="drafter.rnn_v.weight"):
        open_head(save_converted(tmp_path, tensors))


def test_a_folder_without_a_head_is_refused(tmp_path):
    with pytest.raises(CheckpointNotFound, match=r"config.json does not exist"):
        open_head(tmp_path)
    folder = save_head(tmp_path, head_of())
    (folder / "model.safetensors").write_bytes(b"123")
    with pytest.raises(CorruptFile):
        open_head(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointNotFound, match=r"no model.safetensors"):
        open_head(folder)


@pytest.mark.parametrize(
    ("sizes", "found"),
    [((32, 128), "hidden_size 16, the target has 32"), ((16, 127), "vocab_size 128, the target")],
)
def test_a_head_of_another_target_is_refused(tmp_path, sizes, found):
    head = open_head(save_head(tmp_path, head_of()))
    require_fit(head, 16, 128)
    with pytest.raises(PairMismatch, match=found):
        require_fit(head, *sizes)
