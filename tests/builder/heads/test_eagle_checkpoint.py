"""EAGLE-3 heads that would load and draft nonsense, or are of another target: named errors."""

from __future__ import annotations

import pytest
import torch
from support.eagle import LAYOUTS, make_head, save_head

from llmctl.builder.heads.eagle.checkpoint import check_head, open_head
from llmctl.builder.heads.eagle.config import choose_taps, read_config
from llmctl.errors import (
    BadConfig,
    BadTensorShape,
    BadTensorValue,
    CorruptFile,
    MissingTensor,
    PairMismatch,
    UnexpectedTensor,
)

TAPS = (2, 4, 5)


def check(folder, hidden=64, vocab=131, taps=TAPS):
    return check_head(open_head(folder), taps, hidden, vocab)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_config_json_leaves_out_has_one_meaning(tmp_path, layout):
    folder = save_head(tmp_path, make_head(), layout)
    config = read_config(folder / "config.json")
    assert not config.rope and not config.norm_before_residual and config.layer_ids is None
    assert config.is_speculators == (layout == "speculators")
    save_head(tmp_path, make_head(), layout, norm_before_residual=True, rope_theta=5e5)
    config = read_config(folder / "config.json")
    assert config.norm_before_residual and config.rope == {"rope_theta": 5e5}


@pytest.mark.parametrize(
    ("stated", "asked", "wanted"),
    [
        (None, None, (2, 16, 29)),
        ([2, 16, 29], None, (2, 16, 29)),
        ([1, 15, 28], None, (2, 16, 29)),  # named by outputs: the same layers
        ([1, 15, 28], "1,15,28", (1, 15, 28)),
        ([24, 30, 31], None, (24, 30, 31)),
    ],
)
def test_layer_ids_come_in_two_conventions(stated, asked, wanted):
    assert choose_taps(stated, 32, asked, "config.json") == wanted


def test_layers_that_are_not_there_are_refused():
    with pytest.raises(BadConfig, match="layers 0 to 7"):
        choose_taps([2, 16, 29], 8, None, "config.json")
    with pytest.raises(BadConfig, match="a list of layers"):
        choose_taps(None, 8, "2;4", "config.json")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_stored_embedding_is_read_unless_it_is_a_copy(tmp_path, layout):
    tensors = make_head(own_embedding=True)
    assert check(save_head(tmp_path / "a", tensors, layout)).has_embedding == (layout == "eagle")
    assert check(save_head(tmp_path / "b", tensors, layout, embed_requires_grad=True)).has_embedding


def absolute(tensors):
    tensors["d2t"] = tensors["d2t"] + torch.arange(len(tensors["d2t"]))


def outside(tensors):
    tensors["d2t"][-1] = 131


def other_tokens(tensors):
    tensors["t2d"] = tensors["t2d"].roll(1)


def no_map(tensors):
    del tensors["d2t"], tensors["t2d"]


def no_norm(tensors):
    del tensors["midlayer.hidden_norm.weight"]


def no_output(tensors):
    del tensors["lm_head.weight"]


def narrow(tensors):
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:49]


def bias(tensors):
    tensors["midlayer.self_attn.q_proj.bias"] = torch.zeros(64)


@pytest.mark.parametrize(
    ("change", "error", "found"),
    [
        (absolute, BadTensorValue, "offsets|leads to token"),
        (outside, BadTensorValue, "leads to token 180"),
        (other_tokens, BadTensorValue, "different tokens"),
        (no_map, MissingTensor, "d2t and t2d"),
        (no_norm, MissingTensor, "hidden_norm.weight"),
        (no_output, MissingTensor, "lm_head.weight"),
        (narrow, BadTensorShape, "config.json implies"),
        (bias, UnexpectedTensor, "q_proj.bias"),
    ],
)
def test_tensors_that_do_not_fit_together_are_refused(tmp_path, change, error, found):
    tensors = make_head()
    change(tensors)
    with pytest.raises(error, match=found):
        check(save_head(tmp_path, tensors))


def test_the_head_of_another_target_is_refused(tmp_path):
    folder = save_head(tmp_path, make_head())
    for wrong in ({"hidden": 128}, {"vocab": 140}, {"taps": (2, 4)}):
        with pytest.raises(PairMismatch, match="trained for this target|the target wants"):
            check(folder, **wrong)
    both = {"fc_norm": True, "norm_before_fc": True}
    with pytest.raises(CorruptFile, match="one norm or one each"):
        open_head(save_head(tmp_path / "fc", make_head(), "speculators", **both))


def test_the_norm_of_the_features_is_there_where_config_json_says_so_and_nowhere_else(tmp_path):
    with pytest.raises(MissingTensor, match="input_norm.weight"):
        check(save_head(tmp_path / "a", make_head(), "speculators", norm_before_fc=True))
    tensors = make_head(input_norm=True)
    with pytest.raises(UnexpectedTensor, match="input_norm.weight"):
        check(save_head(tmp_path / "b", tensors, norm_before_fc=False))
    assert check(save_head(tmp_path / "c", tensors, norm_before_fc=True)).config.norm_before_fc
    tensors = make_head(fc_norm=True)
    assert check(save_head(tmp_path / "d", tensors, fc_norm=True)).config.fc_norm
    with pytest.raises(UnexpectedTensor, match="fc_norm.0.weight"):
        check(save_head(tmp_path / "e", tensors))
    del tensors["fc_norm.2.weight"]
    with pytest.raises(MissingTensor, match="fc_norm.2.weight"):
        check(save_head(tmp_path / "f", tensors, "speculators", fc_norm=True))
