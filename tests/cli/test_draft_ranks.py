"""`llmctl build --draft-tp`: replicated or sharded, by choice or by what is computed, and said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmctl.builder.engine_format import read_engine_config
from scripts.models.make_planted_checkpoints import Recipe, write_checkpoint

pytestmark = pytest.mark.usefixtures("forked_ranks")
SHORT = ("--max-seq-len", 512)
RUN = ("--max-output-len", 24, "--end-id", -1, "--no-add-special-tokens", "--input-text", "one two")


@pytest.fixture(scope="module")
def config_only(tmp_path_factory: pytest.TempPathFactory):
    """A folder with config.json alone, of a shape in FP8."""

    def make(shape: str) -> Path:
        folder: Path = tmp_path_factory.mktemp("configs") / shape
        write_checkpoint(folder, Recipe(shape, quantization="fp8"), config_only=True)
        return folder

    return make


@pytest.mark.parametrize(
    ("shape", "tp_size", "chosen", "why"),
    [
        ("1b", 2, 1, "replicated (computed for h200: a step takes 0.404 ms on 1, 0.44"),
        ("1b", 8, 8, "sharded (computed for h200: a step takes 0.404 ms on 1, 0.30"),
        ("8b", 2, 2, "sharded (computed for h200: a step takes 1.89 ms on 1, 1.3"),
        ("tiny", 8, 1, "replicated (--tp-size 8: the model's num_attention_heads is 4"),
        ("tiny", 1, 1, "replicated (a target of one rank)"),
    ],
)
def test_auto_takes_what_is_computed_to_be_faster_and_says_so(
    llmctl, config_only, shape: str, tp_size: int, chosen: int, why: str
) -> None:
    line = ("build", "--checkpoint-dir", config_only(shape), "--dry-run", "--json", "--gpu",
            "h200")  # fmt: skip
    done = llmctl(*line, *SHORT, "--tp-size", tp_size, "--draft-tp", "auto")
    assert f"draft ranks: {chosen} beside a target of {tp_size}, {why}" in done.err
    assert json.loads(done.out)["memory"]["num_ranks"] == chosen


def test_gpus_that_no_link_joins_get_one_rank(llmctl, config_only) -> None:
    line = ("build", "--checkpoint-dir", config_only("1b"), "--dry-run", "--gpu", "gh200")
    done = llmctl(*line, *SHORT, "--tp-size", 4, "--draft-tp", "auto")
    assert "draft ranks: 1 beside a target of 4, replicated (what 4 gh200 take for" in done.err


@pytest.mark.parametrize(
    ("option", "ranks", "said"),
    [
        (("--draft-tp", "auto"), 1, "replicated (ranks share the cores and memory"),
        (("--draft_tp=1",), 1, "replicated (as requested)"),
        (("--draft_tp", "2"), 2, "sharded (as requested)"),
    ],
)
def test_a_draft_of_either_kind_changes_no_text(
    llmctl, engines, rank_engines, tmp_path: Path, option: tuple[str, ...], ranks: int, said: str
) -> None:
    """Beside a target of two ranks of the cpu."""
    line = ("build", "--checkpoint-dir", engines.draft_checkpoint, "--backend", "cpu", *SHORT)
    built = llmctl(*line, "--tp-size", 2, *option, "--output-dir", tmp_path / "draft")
    assert built.code == 0
    assert f"draft ranks: {ranks} beside a target of 2, {said}" in built.err
    assert read_engine_config(tmp_path / "draft").num_ranks == ranks
    plain = llmctl("run", "--engine-dir", rank_engines.target, *RUN)
    drafted = llmctl("run", "--engine-dir", rank_engines.target, *RUN, "--draft-engine",
                     tmp_path / "draft", "--draft-len", 3)  # fmt: skip
    assert (plain.code, drafted.code) == (0, 0), drafted.err
    assert plain.out == drafted.out and plain.out.strip()


@pytest.mark.parametrize(
    ("options", "name", "message", "fix"),
    [
        (("--tp-size", 2, "--draft-tp", 4), "BadConfig", "4 beside --tp-size 2", "auto, 1"),
        (("--draft-tp", 2), "BadConfig", "--draft-tp 2 beside --tp-size 1", "--tp-size"),
        (("--tp-size", 2, "--draft-tp", "both"), "BadConfig", "--draft-tp is 'both'", "auto, 1"),
        (("--tp-size", 2, "--draft-tp", 0), "BadConfig", "--draft-tp 0 beside", "auto, 1"),
        (("--tp-size", 2, "--draft-tp", 2, "--max-draft-len", 4), "BadConfig",
         "--max-draft-len 4 makes the engine a target", "leave one"),
        (("--tp-size", 3, "--draft-tp", "auto"), "Unsupported", "runs with so many ranks", "2, 4"),
        (("--tp-size", 3, "--draft-tp", 3), "Unsupported", "--tp-size 3 is refused", "--tp-size"),
    ],
)  # fmt: skip
def test_what_no_target_can_have_beside_it_is_refused_by_name(
    llmctl, engines, options: tuple[object, ...], name: str, message: str, fix: str
) -> None:
    line = ("build", "--checkpoint-dir", engines.draft_checkpoint, "--backend", "cpu", "--dry-run")
    done = llmctl(*line, *options)
    assert done.code != 0 and f"error[{name}]" in done.err
    assert message in done.err and fix in done.err.partition("fix:")[2]
