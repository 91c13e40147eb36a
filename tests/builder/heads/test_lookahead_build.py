"""Engines for lookahead decoding: room for a window, what they say of it, what is refused."""

from __future__ import annotations

from dataclasses import astuple
from pathlib import Path

import pytest
from support.cuda_build import HEADS
from support.hostile_engine import HostileEngine

from llmctl.builder.config import BuildRequest
from llmctl.builder.engine_format import LookaheadDecodingConfig, open_engine, read_engine_config
from llmctl.builder.heads.lookahead.mode import invent_lookahead
from llmctl.builder.validation.kernels import check_kernels
from llmctl.cli.main import execute
from llmctl.errors import BadConfig, CorruptEngine
from llmctl.plugins.device_loop.tree_kernel import round_kernels
from llmctl.plugins.ops.lookahead.arrays import LookaheadSizes
from llmctl.plugins.ops.lookahead.kernel import kernels

MODE = "lookahead_decoding"


@pytest.fixture
def target(new_model, save) -> Path:
    return Path(save(new_model("llama", head_dim=64)))


@pytest.mark.parametrize(
    ("sizes", "drafts"),
    # TensorRT-LLM's documented examples, the published default and setting, the smallest
    [
        ((7, 7, 7), 83),
        ((4, 3, 4), 15),
        ((7, 5, 7), 55),
        ((15, 5, 15), 119),
        ((5, 6, 7), 59),
        ((2, 2, 1), 2),
        ((1, 1, 0), 0),
        ((3, 2, 0), 2),
    ],
)
def test_a_round_has_as_many_drafts_as_tensorrt_llm_counts(sizes, drafts):
    config = LookaheadDecodingConfig(*sizes)
    assert config.max_draft_len == drafts
    assert LookaheadDecodingConfig.parse(str(list(sizes))) == config
    assert astuple(LookaheadDecodingConfig()) == (4, 3, 4), "TensorRT-LLM's defaults"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[1,2]", "form"),
        ("[1,2,3,4]", "form"),
        ("5", "form"),
        ("", "form"),
        ("[1,2,__import__('os')]", "form"),
        ("[0,2,1]", "window_size is 0"),
        ("[2,0,1]", "ngram_size is 0"),
        ("[2,2,-1]", "verification_set_size is -1"),
        ("[True,2,1]", "window_size is True"),
        ("[2.0,2,1]", "window_size is 2.0"),
        ("[2,1,0]", "ngram_size is 1, which drafts nothing"),
        ("[1,1,1]", "ngram_size is 1, which drafts nothing"),
        ("[1000,3,1000]", "3999 drafts per round; at most 1024"),
        ("[1,1030,0]", "at most 1024"),
    ],
)
def test_sizes_that_no_window_has_are_refused(text, words):
    with pytest.raises(BadConfig, match="--lookahead-config is") as caught:
        LookaheadDecodingConfig.parse(text)
    assert words in str(caught.value)


def test_the_sizes_of_a_window_decide_the_room_and_are_kept(target, build_engine, capsys):
    mode = {"speculative_decoding_mode": MODE, "lookahead_config": "[3, 4, 2]"}
    folder = Path(build_engine(target, max_draft_len=0, **mode))
    build = read_engine_config(folder).build_config
    assert build["max_draft_len"] == 2 + (2 + 2) * 3
    assert build["speculative_decoding_mode"] == 8, "as TensorRT-LLM counts"
    assert build["draft_heads"] == {
        "window_size": 3,
        "ngram_size": 4,
        "verification_set_size": 2,
    }
    plan, _ = open_engine(folder)
    assert not plan.heads
    assert execute(["inspect", str(folder)]) == 0
    assert "lookahead with 3 columns, 2 n-grams of 4 tokens, 14 drafts" in capsys.readouterr().out


def test_room_alone_is_enough(target, build_engine):
    """As trtllm-build takes it."""
    folder = build_engine(target, max_draft_len=5, speculative_decoding_mode=MODE)
    build = read_engine_config(Path(folder)).build_config
    assert build["max_draft_len"] == 5 and build["draft_heads"] == {}


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("sizes", ["[3,4,2]", None])
def test_an_engine_for_a_gpu_has_the_kernels_of_its_windows(new_model, save, build_engine, sizes):
    """Where it has sizes; else the host leads, and it has none."""
    target = save(new_model("llama", **HEADS))
    folder = build_engine(
        target,
        backend="cuda",
        dtype="bfloat16",
        speculative_decoding_mode=MODE,
        lookahead_config=sizes,
        max_draft_len=14,
        max_batch_size=2,
        max_num_tokens=32,
        max_seq_len=96,
    )
    plan, weights = open_engine(folder)
    stored = {kernel.name for kernel in plan.kernels}
    own = {spec.name for spec in kernels(LookaheadSizes(3, 4, 2), 14)}
    assert {spec.name for spec in round_kernels(2, 14)} <= stored, "of any trees"
    assert (own <= stored) if sizes else not own & stored
    config = read_engine_config(folder)
    check_kernels(config, plan, weights)
    config.build_config["draft_heads"].update(window_size=2, ngram_size=2, verification_set_size=1)
    with pytest.raises(CorruptEngine, match="there is no kernel"):
        check_kernels(config, plan, weights)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "needs the sizes of a window"),
        ({"lookahead_config": "[1,1,0]"}, r"\[1,1,0\] drafts nothing"),
        ({"lookahead_config": "[1,2,0]"}, r"\[1,2,0\] drafts nothing"),
        ({"lookahead_config": "[4,3,4]", "max_draft_len": 14}, "15 drafts per round; --max-draft"),
        ({"lookahead_config": "[4,3]"}, "form"),
    ],
)
def test_impossible_builds_are_refused(options, words):
    with pytest.raises(BadConfig, match=words):
        invent_lookahead(BuildRequest(speculative_decoding_mode=MODE, **options), None)


def test_the_option_belongs_to_its_mode():
    with pytest.raises(BadConfig, match="--lookahead-config is for --speculative-decoding-mode"):
        BuildRequest(lookahead_config="[4,3,4]", max_draft_len=15)


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"window_size": 3}, "window_size"),
        ({"window_size": 3, "ngram_size": 4, "verification_set_size": 2, "more": 1}, "more"),
        ({"window_size": 0, "ngram_size": 4, "verification_set_size": 2}, "window_size is 0"),
        ({"window_size": "3", "ngram_size": 4, "verification_set_size": 2}, "window_size is '3'"),
        ({"window_size": 3, "ngram_size": 4, "verification_set_size": 3}, "17 drafts per round"),
        ({"window_size": 1, "ngram_size": 1, "verification_set_size": 0}, "0 drafts per round"),
        ({"window_size": 2**40, "ngram_size": 2, "verification_set_size": 0}, "at most 1024"),
        ([3, 4, 2], "no object"),
    ],
)
def test_facts_that_no_build_writes_are_refused(target, build_engine, tmp_path, facts, words):
    mode = {"speculative_decoding_mode": MODE, "lookahead_config": "[3, 4, 2]"}
    engine = HostileEngine.read(Path(build_engine(target, max_draft_len=0, **mode)))
    engine.config["build_config"]["draft_heads"] = facts
    with pytest.raises(CorruptEngine, match=words):
        read_engine_config(engine.write(tmp_path / "edited"))
