"""`llmctl build --dry-run` of engines of several ranks, and of checkpoints without weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmctl.cli.build.dry_run_ranks import advice_lines, rank_lines
from llmctl.cli.gpus import GB, GPUS
from llmctl.plugins.backends.cpu.binding import load_kernels
from scripts.models.make_planted_checkpoints import Recipe, write_checkpoint
from scripts.models.planted_shapes import SHAPES


@pytest.fixture(scope="module")
def config_only(tmp_path_factory: pytest.TempPathFactory):
    """A folder with config.json alone, of a shape in FP8 or as --qformat says."""
    made: dict[tuple[str, str | None], Path] = {}

    def make(shape: str, qformat: str | None = "fp8") -> Path:
        if (shape, qformat) not in made:
            folder = tmp_path_factory.mktemp("configs") / shape
            write_checkpoint(folder, Recipe(shape, quantization=qformat), config_only=True)
            made[shape, qformat] = folder
        return made[shape, qformat]

    return make


@pytest.fixture
def planned(llmctl):
    """The plan of a checkpoint as an object, and the exit code."""

    def plan(checkpoint: Path, *options: object) -> tuple[dict[str, Any], int]:
        words = ("build", "--checkpoint-dir", checkpoint, "--dry-run", "--json", *options)
        done = llmctl(*words, "--log-level", "error")
        assert done.err == ""
        return json.loads(done.out), done.code

    return plan


# ---- without weights ----


def test_config_json_alone_can_be_planned_and_is_said_to_be_alone(llmctl, config_only):
    folder = config_only("tiny")
    line = ("build", "--checkpoint-dir", folder, "--backend", "cpu", "--max-seq-len", 512)
    done = llmctl(*line, "--dry-run")
    assert done.code == 0 and "no weights are here; config.json says which" in done.err
    assert "wherever it is built" in done.out
    refused = llmctl(*line, "--output-dir", folder / "engine")
    assert refused.code == 1 and "has neither model.safetensors" in refused.err
    refused = llmctl(*line, "--cache-key")
    assert refused.code == 1 and "has neither model.safetensors" in refused.err


def test_a_plan_without_weights_is_the_plan_with_them(planned, config_only, tmp_path):
    write_checkpoint(tmp_path / "whole", Recipe("tiny"))
    for options in (["--backend", "cpu"], ["--gpu", "h200"], ["--backend", "cpu", "--tp-size", 2]):
        plans = [
            planned(folder, "--max-seq-len", 512, *options)[0]
            for folder in (tmp_path / "whole", config_only("tiny"))
        ]
        for plan in plans:
            del plan["memory"]["disk"]
            for name in ("free_bytes", "kv_limit_bytes", "max_kv_tokens", "table"):
                del plan["memory"][name]  # of what is free at the moment
        assert plans[0] == plans[1]
        assert plans[0]["quantization"]["quant_algo"] == "FP8"


def test_pickles_and_lost_shards_are_not_taken_for_a_folder_without_weights(
    llmctl, config_only, tmp_path
):
    for name in ("pytorch_model.bin", "model.safetensors.index.json", "model-1.safetensors"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_bytes((config_only("tiny") / "config.json").read_bytes())
        (folder / name).write_text("{}")
        done = llmctl("build", "--checkpoint-dir", folder, "--dry-run", "--backend", "cpu")
        assert done.code == 1, done


# ---- ranks that share a memory ----


def test_ranks_of_a_cpu_share_its_memory(planned, config_only):
    limits = ("--backend", "cpu", "--max-seq-len", 512)
    plans = {n: planned(config_only("tiny"), *limits, "--tp-size", n)[0] for n in (1, 2, 4)}
    for ranks, plan in plans.items():
        memory = plan["memory"]
        assert (memory["num_ranks"], memory["ranks_here"]) == (ranks, ranks)
        parts = memory["weight_bytes"] + memory["activation_bytes"]
        segment = load_kernels().llmctl_ranks_bytes(ranks) if ranks > 1 else 0
        assert memory["needed_bytes"] == ranks * parts + segment
        left = memory["free_bytes"] - memory["needed_bytes"]
        assert memory["kv_limit_bytes"] == int(left * memory["kv_fraction"])
        whole = ranks * memory["kv_bytes_per_token"]
        assert memory["max_kv_tokens"] == memory["kv_limit_bytes"] // (32 * whole) * 32
        assert memory["table"]["bytes"][0][0] == memory["needed_bytes"] + 512 * whole
    # 2 KV heads: one on each of two ranks, repeated on four
    per_token = [plans[n]["memory"]["kv_bytes_per_token"] for n in (1, 2, 4)]
    assert per_token == [2 * per_token[1], per_token[1], per_token[1]]


def test_ranks_that_do_not_fit_together_do_not_fit(planned, config_only, monkeypatch):
    """Though each would fit alone."""
    options = ("--backend", "cpu", "--max-seq-len", 512, "--tp-size", 4)
    found, _ = planned(config_only("tiny"), *options)
    room = found["memory"]["needed_bytes"] // 2
    monkeypatch.setattr("llmctl.plugins.backends.host_memory.free_memory_bytes", lambda: room)
    plan, code = planned(config_only("tiny"), *options)
    assert code == 3 and plan["memory"]["fits"] is False
    assert plan["memory"]["weight_bytes"] < room


def test_people_are_told_what_is_each_rank_s(llmctl, config_only):
    line = ("build", "--checkpoint-dir", config_only("tiny"), "--dry-run", "--backend", "cpu")
    done = llmctl(*line, "--tp-size", 2, "--max-seq-len", 512)
    rows = [" ".join(row.split()) for row in done.out.splitlines()]
    assert any(row.startswith("weights") and "for each of 2 ranks" in row for row in rows)
    assert any(row.startswith("exchange") for row in rows)
    assert "by --tp-size" not in done.out, "ranks of a CPU share what one would have"


# ---- what would fit ----


def _row(ranks: int, needed: int, *, step_ms: list[float] | None, fits: bool) -> dict[str, Any]:
    return {
        "num_ranks": ranks,
        "refused": None,
        "fits": fits,
        "weight_bytes": needed - 2 * GB,
        "beside_bytes": 2 * GB,
        "needed_bytes": needed,
        "kv_bytes_per_token": 1000,
        "max_kv_tokens": 582_528,
        "most_sequences": 4,
        "step_ms": step_ms,
    }


ROWS = [
    _row(1, 412 * GB, step_ms=[90.0, 90.0], fits=False),
    _row(2, 209 * GB, step_ms=[47.0, 48.0], fits=False),
    _row(4, 108 * GB, step_ms=[23.8, 24.3], fits=True),
    _row(8, 57 * GB, step_ms=[13.5, 14.0], fits=True),
]
PLAN = {"memory": "h200", "free_bytes": 149_500_000_000, "needed_bytes": 209 * GB, "ranks_here": 1}


def test_an_engine_that_does_not_fit_says_what_would():
    lines = list(advice_lines(ROWS, PLAN, None))
    assert lines[0] == "does not fit in 150 GB: a rank needs 209 GB before any KV cache"
    assert lines[1] == "would fit: --tp-size 4 (108 GB each)"
    assert lines[2].startswith("would need about half: weights in FP8")
    assert len(list(advice_lines(ROWS, PLAN, "FP8"))) == 2, "it is in FP8 already"
    smaller = {**PLAN, "memory": "h100", "free_bytes": 80 * GB, "needed_bytes": 108 * GB}
    larger = "would fit: --gpu h200 (150 GB), h200-nvl (141 GB)"
    assert list(advice_lines([], smaller, "FP8"))[1] == larger
    assert GPUS["h200"].memory_bytes > 108 * GB


def test_rows_say_by_how_much_and_which_is_fastest():
    text = [" ".join(line.split()) for line in rank_lines(ROWS, PLAN, 131072)]
    assert "2 207 GB 2 GB 59.5 GB too much - -" in text
    assert "4 106 GB 2 GB 582,528 4 23.8 to 24.3" in text
    assert text[-1] == "fastest: --tp-size 8"


def test_a_draft_engine_is_divided_where_its_steps_get_shorter():
    """By more than 2 %: else one rank needs no meetings to be right about."""
    steps = {1: [0.404, 0.404], 2: [0.449, 0.515], 4: [0.37, 0.43], 8: [0.342, 0.408]}
    rows = [_row(n, 3 * GB, step_ms=step, fits=True) for n, step in steps.items()]
    *_, last = rank_lines(rows, PLAN, 4096)
    beside = "1 beside a target of 2, 1 beside a target of 4, 8 beside a target of 8"
    assert last == f"ranks of it as a draft engine: {beside}"


def test_a_number_of_ranks_that_does_not_divide_the_model_says_why():
    rows = [*ROWS[2:], {"num_ranks": 16, "refused": "the heads do not divide"}]
    lines = [" ".join(line.split()) for line in rank_lines(rows, PLAN, 4096)]
    assert "16 - - - - -" in lines and "16 ranks: the heads do not divide" in lines


@pytest.mark.parametrize(("shape", "fitting"), [("405b", [4, 8]), ("1b", [1, 2, 4, 8])])
def test_every_number_of_ranks_is_planned_on_gpus(planned, config_only, shape, fitting):
    options = ("--gpu", "h200", "--max-seq-len", 8192)
    plan, code = planned(config_only(shape), *options, "--tp-size", 2)
    assert code == (0 if 2 in fitting else 3)
    memory = plan["memory"]
    rows = {row["num_ranks"]: row for row in memory["by_tp_size"]}
    assert list(rows) == [1, 2, 4, 8]
    assert [ranks for ranks, row in rows.items() if row["fits"]] == fitting
    assert (memory["num_ranks"], memory["ranks_here"], memory["memory"]) == (2, 1, "h200")
    for name in ("weight_bytes", "needed_bytes", "kv_bytes_per_token", "max_kv_tokens", "fits"):
        assert rows[2][name] == memory[name]
    if shape == "405b":
        assert rows[1]["weight_bytes"] == pytest.approx(410e9, rel=0.01)
    # The embedding is whole on every rank, all else is divided.
    model = SHAPES[shape]
    embedding = 2 * model.vocab * model.hidden
    for ranks, row in rows.items():
        divided = (rows[1]["weight_bytes"] - embedding) / ranks
        assert row["weight_bytes"] == pytest.approx(embedding + divided, rel=0.01)
        assert row["kv_bytes_per_token"] == rows[1]["kv_bytes_per_token"] // ranks
        least, most = row["step_ms"]
        assert least == most if ranks <= 2 else least < most, "two were measured"


def test_a_model_that_does_not_divide_is_planned_for_what_it_divides_by(
    planned, config_only, tmp_path
):
    config = json.loads((config_only("tiny") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_attention_heads": 4}))
    plan, _ = planned(tmp_path, "--gpu", "h200", "--max-seq-len", 512)
    refused = {row["num_ranks"]: row["refused"] for row in plan["memory"]["by_tp_size"]}
    assert refused[1] is None and refused[2] is None
    assert "num_attention_heads is 4, which does not divide evenly" in refused[8]


def test_an_engine_that_ranks_cannot_divide_has_no_table(llmctl, config_only, tmp_path):
    """An odd number of heads; draft heads are whole on every rank."""
    config = json.loads((config_only("tiny") / "config.json").read_text())
    odd = {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 64}
    (tmp_path / "config.json").write_text(json.dumps(config | odd))
    line = ("build", "--dry-run", "--gpu", "h200", "--max-seq-len", 512, "--checkpoint-dir")
    done = llmctl(*line, tmp_path)
    assert done.code == 0 and "by --tp-size" not in done.out
    heads = ("--speculative-decoding-mode", "medusa", "--num-medusa-heads", 2)
    assert "by --tp-size" in llmctl(*line, config_only("tiny"), *heads).out
