"""What is asked of engines is refused where it is asked for, before any of them is read."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from support.executor import config as executor_config

import llmctl
from llmctl.errors import BadConfig
from llmctl.runtime.api.executor_config import ExecutorConfig, KvCacheConfig
from llmctl.runtime.drafting.draft_engine.method import DraftEngine
from llmctl.runtime.drafting.draft_engine.tree import DraftTree
from llmctl.runtime.drafting.eagle.method import Eagle
from llmctl.runtime.drafting.lookahead.method import LookaheadDecoding
from llmctl.runtime.drafting.medusa.method import Medusa
from llmctl.runtime.drafting.ngram.method import NgramLookup
from llmctl.runtime.drafting.redrafter.method import RecurrentDrafting
from llmctl.runtime.engine_options import EngineOptions
from llmctl.runtime.kv_cache.attention_windows import WindowOptions
from llmctl.runtime.schedule.admission import Limits, SchedulerConfig


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"scheduler_policy": "max_utilization"},
            "must be a member of CapacitySchedulerPolicy .MAX_",
        ),
        ({"context_chunking_policy": "equal_progress"}, "a member of ContextChunkingPolicy"),
        ({"adaptive_draft_len": True}, "adaptive_draft_len is set without a draft"),
        ({"max_tokens": 0}, "max_tokens of the KV cache is 0"),
        ({"rank_timeout_s": float("nan")}, "--rank-timeout is nan"),
        ({"host_memory_bytes": 1 << 20, "enable_block_reuse": False}, "block reuse is off"),
    ],
)
def test_what_would_be_ignored_is_refused(given, said):
    with pytest.raises(BadConfig, match=said):
        EngineOptions(Path("engine"), **given)


def options(**fields):
    return EngineOptions(**{"engine_dir": "engine", **fields})


def limits(**fields):
    return Limits(**{"max_batch_size": 1, "max_num_tokens": 64, "max_seq_len": 64, **fields})


@pytest.mark.parametrize(
    ("make", "given", "wanted"),
    [
        (options, {"engine_dir": 5}, "a path"),
        (options, {"method": "ngram"}, "of type DraftMethod"),
        (options, {"adaptive_draft_len": 1}, "True or False"),
        (options, {"enable_block_reuse": "no"}, "True or False"),
        (options, {"free_fraction": "0.5"}, "a number, or None"),
        (options, {"free_fraction": float("nan")}, r"in \(0, 1\)"),
        (options, {"free_fraction": -0.5}, r"in \(0, 1\)"),
        (options, {"max_tokens": True}, "an integer, or None"),
        (options, {"host_memory_bytes": -1}, "at least 1"),
        (options, {"max_batch_size": 0}, "at least 1"),
        (options, {"max_num_tokens": 64.0}, "an integer, or None"),
        (options, {"max_num_tokens": 0}, "at least 1"),
        (options, {"free_fraction": 10**400}, "a number, or None"),
        (options, {"max_step_ms": 10**400}, "a number, or 'auto', or None"),
        (options, {"num_threads": -2}, "at least 1"),
        (options, {"num_threads": "2"}, "an integer, or None"),
        (options, {"tp_size": "2"}, "an integer, or None"),
        (options, {"rank_timeout_s": "30"}, "a number, or None"),
        (options, {"rank_timeout_s": True}, "a number, or None"),
        (options, {"max_step_ms": True}, "a number, or 'auto', or None"),
        (options, {"trusted_builder": 7}, "a path, or of type str, or None"),
        (options, {"windows": (64,)}, "of type WindowOptions"),
        (WindowOptions, {"sizes": ("64",)}, "a sequence of integers"),
        (WindowOptions, {"sizes": 64}, "a sequence of integers"),
        (WindowOptions, {"sink_tokens": 1.5}, "an integer"),
        (KvCacheConfig, {"num_blocks": "8"}, "an integer"),
        (KvCacheConfig, {"num_blocks": -1}, "at least 1"),
        (KvCacheConfig, {"num_blocks": 8, "window": 64}, "of type AttentionWindow, or None"),
        (ExecutorConfig, {"kv_cache": 8}, "of type KvCacheConfig"),
        (executor_config, {"acceptance": "all"}, "'tokens' or 'logits'"),
        (executor_config, {"max_queue_size": True}, "an integer, or None"),
        (executor_config, {"iter_stats_max_iterations": 1.5}, "an integer"),
        (SchedulerConfig, {"enable_chunked_context": 1}, "True or False"),
        (limits, {"max_seq_len": "64"}, "an integer"),
        (DraftEngine, {"engine": None}, "a path"),
        (DraftEngine, {"engine": "x", "tree": (5, 3, 16)}, "of type DraftTree, or None"),
        (DraftEngine, {"engine": "x", "draft_len": 0}, "at least 1"),
        (DraftTree, {"depth": 5, "branch": 3.0, "nodes": 16}, "an integer"),
        (NgramLookup, {"draft_len": "4", "max_ngram": 2}, "an integer, or None"),
        (NgramLookup, {"draft_len": 4, "max_ngram": 0}, "at least 1"),
        (Medusa, {"tree": [[0]]}, "of type MedusaTree, or None"),
        (Medusa, {"draft_len": True}, "an integer, or None"),
        (RecurrentDrafting, {"num_beams": -4}, "at least 1"),
        (RecurrentDrafting, {"length": 0}, "at least 1"),
        (Eagle, {"depth": 2.5}, "an integer, or None"),
        (Eagle, {"depth": 0}, "at least 1"),
        (Eagle, {"num_offers": 0}, "at least 1"),
        (Eagle, {"acceptance": np.array(["tokens", "logits"])}, "'tokens' or 'logits'"),
        (Eagle, {"acceptance": "some"}, "'tokens' or 'logits'"),
        (LookaheadDecoding, {"config": [4, 3, 4]}, "of type LookaheadDecodingConfig, or None"),
    ],
)
def test_values_of_another_kind_are_refused_by_name(make, given, wanted):
    """They ended in a TypeError deep inside, or were taken: "no" for True, True for 1 token."""
    names = "|".join(map(re.escape, given))
    with pytest.raises(BadConfig, match=rf"({names}).* is .*; it must be {wanted}") as caught:
        make(**given)
    assert caught.value.exit_code == 2


def test_names_of_paths_and_numbers_of_numpy_are_stored_as_pythons():
    made = options(max_tokens=np.int64(64), free_fraction=np.float32(0.5), rank_timeout_s=5)
    assert made.engine_dir == Path("engine") and isinstance(made.engine_dir, Path)
    assert (type(made.max_tokens), type(made.free_fraction)) == (int, float)
    assert type(made.rank_timeout_s) is float
    assert WindowOptions([64, np.int32(32)]).sizes == (64, 32)
    assert DraftEngine("x").engine == Path("x")


@pytest.mark.parametrize("given", [{"engine": 5}, {"engine": "x", "draft": 3},
                                   {"engine": "x", "draft": "y", "draft_tree": 5}])  # fmt: skip
def test_open_names_what_it_cannot_take(given):
    with pytest.raises(BadConfig, match="^(engine_dir is 5|method is 3|--draft-tree is 5)"):
        llmctl.open(**given)


@pytest.mark.parametrize("given", [{"engine": ""}, {"engine": "x", "draft": ""}], ids=str)
def test_an_empty_name_is_not_the_current_folder(given):
    """Of a variable of the environment that is not set, as an option of the command line."""
    with pytest.raises(BadConfig, match=r"^(engine_dir|draft) is '' \(str\); it must be a path"):
        llmctl.open(**given)


@pytest.mark.parametrize(
    ("given", "nearest"),
    [
        ({"max_batchsize": 4}, "the nearest: max_batch_size, .*"),
        ({"draft_engine": "y"}, "the nearest: draft_tree, engine, draft"),
        ({"engine_dir": "y"}, "the nearest: engine.*"),
        ({"xyz": 1}, "there are adaptive_draft_len, .*, draft, .*"),
    ],
    ids=str,
)
def test_open_knows_no_other_options(given, nearest):
    (name,) = given
    with pytest.raises(
        BadConfig, match=rf"llmctl.open\({name}=.*\): there is no {name}"
    ) as mistake:
        llmctl.open("x", **given)
    assert re.fullmatch(nearest, mistake.value.fix)
