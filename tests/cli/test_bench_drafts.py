"""`llmctl bench`: drafts accepted at random, and which number of drafts is best."""

from __future__ import annotations

import json

import pytest
from support.bench import raw
from support.bench_runs import SHORT
from support.redrafter import make_head, save_head

from llmctl.cli.main import execute


def test_synthetic_acceptance_has_the_length_asked_for_and_is_marked_everywhere(
    bench, drafted, tmp_path
):
    path = tmp_path / "raw.jsonl"
    report, done = bench("throughput", *drafted, "--synthetic-acceptance", 2.4, "--raw", path,
                         "--target-input-len", 12, "--target-output-len", 300)  # fmt: skip
    decoding = report["decoding_stats"]
    assert decoding["acceptance_length"] == pytest.approx(2.4, abs=0.05)
    first, second, third = decoding["acceptance_at_position"]
    assert (first, third) == (1, 0) and second == pytest.approx(0.4, abs=0.05)
    assert report["synthetic_acceptance"]["acceptance_length"] == 2.4
    assert "SYNTHETIC ACCEPTANCE" in done.err
    assert all(item["is_synthetic_acceptance"] for kind in raw(path) for item in kind)


def test_synthetic_rates_are_those_of_the_positions(bench, drafted):
    report, _ = bench("throughput", *drafted, "--synthetic-acceptance", "[0.8, 0.5, 0.5]",
                      "--target-input-len", 12, "--target-output-len", 400)  # fmt: skip
    found = report["decoding_stats"]["acceptance_at_position"]
    assert found == pytest.approx([0.8, 0.5, 0.5], abs=0.06)


def test_a_sweep_measures_every_length_beside_the_model_and_recommends_the_fastest(bench, engines):
    rates = "[0.9, 0.8, 0.1, 0.1]"
    report, done = bench("latency", "--draft-engine", engines.draft, "--sweep-draft-len", "1..4",
                         "--synthetic-acceptance", rates, "--target-output-len", 120,
                         "--num-requests", 3)  # fmt: skip
    sweep = report["sweep"]
    rows = {row["draft_len"]: row for row in sweep["rows"]}
    assert list(rows) == [0, 1, 2, 3, 4]
    assert sweep["calibrated_on_draft_lens"] == [0, 4]
    for length, row in rows.items():
        wanted = 1 + sum([0.9, 0.8, 0.1, 0.1][:length])
        assert row["acceptance_length"] == pytest.approx(wanted, abs=0.2)
        assert row["decode_tok_s"] == pytest.approx(
            1e3 * row["acceptance_length"] / row["round_ms"], rel=0.1
        )
    speeds = {length: row["decode_tok_s"] for length, row in rows.items()}
    chosen = sweep["recommended_draft_len"]
    assert speeds[chosen] >= 0.99 * max(speeds.values())
    assert report["engine"]["draft_len"] == chosen
    assert "recommended:" in done.err and "model, tok/s" in done.err


@pytest.fixture(scope="module")
def redrafter(engines, tmp_path_factory):
    """The target with a random ReDrafter head, which finds no draft likely."""
    folder = tmp_path_factory.mktemp("redrafter")
    config = json.loads((engines.target_checkpoint / "config.json").read_text())
    save_head(folder / "head", make_head(config["hidden_size"], config["vocab_size"]))
    build = ["build", "--checkpoint-dir", engines.target_checkpoint, "--output-dir",
             folder / "engine", "--max-seq-len", 512, "--max-batch-size", 8, "--max-num-tokens",
             128, "--speculative-decoding-mode", "redrafter", "--draft-model-dir", folder / "head",
             "--redrafter-num-beams", 2, "--redrafter-draft-len-per-beam", 3]  # fmt: skip
    assert execute([str(word) for word in build]) == 0
    return folder / "engine"


def test_what_run_drafts_by_default_is_measured(llmctl, redrafter, tmp_path):
    """A ReDrafter head on the CPU drafts by chance, until a length is asked for."""

    def drafts(*argv):
        path = tmp_path / "raw.jsonl"
        done = llmctl("bench", "latency", "--engine-dir", redrafter, "--redrafter-num-beams",
                      "auto", *SHORT, "--num-requests", 3, "--raw", path, *argv)  # fmt: skip
        assert done.code == 0, done.err
        found = {}
        for step in raw(path)[1]:
            count = sum(drafts for _, drafts, *_ in step["rounds"])
            found[step["draft_len"]] = found.get(step["draft_len"], 0) + count
        return found

    by_chance = drafts("--baseline")
    fixed = drafts("--draft-len", 6)[6]
    assert fixed > 30 and by_chance[0] == 0 and by_chance[6] < fixed / 2
    assert drafts("--sweep-draft-len", "3,6")[6] == fixed


def test_the_cost_model_is_that_of_its_formula():
    from llmctl.cli.bench.sweep import Point, predict, recommend

    def point(length, rates, verify_ms, rest_ms, draft_ms):
        round_ms = draft_ms + verify_ms + rest_ms
        tokens = 1 + sum(rates)
        return Point(
            length, tokens * 1e3 / round_ms, round_ms, draft_ms, verify_ms, tokens, rates, 100
        )

    points = [point(0, (), 17.3, 0.6, 0.0), point(10, tuple(0.8**i for i in range(1, 11)), 17.8,
              0.6, 6.0)]  # fmt: skip
    for length, wanted in ((0, 55.9), (5, 174.5), (9, 188.0), (10, 187.4)):
        assert predict(points, length) == pytest.approx(wanted, abs=0.1)
    assert recommend(points).draft_len == 10


def test_a_length_without_time_between_responses_has_no_figures():
    from llmctl.cli.bench.metrics import gen_tok_s
    from llmctl.cli.bench.records import Arrival, Recording, RequestRecord, Round, StepRecord
    from llmctl.cli.bench.sweep import measure_point

    def request(*arrivals):
        made = RequestRecord(0, 0, 3, 2, 0.0, 0.0, output_ids=[5, 6], is_done=True)
        for at_s, num_tokens in arrivals:
            made.arrivals.append(Arrival(at_s, num_tokens))
        return made

    step = StepRecord(0, 1.0, 1.0, 0.0, 1.0, 0, 0, 1, 0, 1, 2, [Round(0, 0, 0, 1, 0)])
    together, late = request((1.0, 1), (1.0, 1)), request((1.0, 1), (1.00001, 1))
    for one in (together, late):  # the first response of `late` was read when the second was there
        assert measure_point(0, Recording([one], [step], 1)) is None
        assert gen_tok_s(one) is None
    found = measure_point(0, Recording([request((1.0, 1), (1.0, 1), (1.5, 0))], [step], 1))
    assert found is not None and found.decode_tok_s == 2.0


def test_the_shortest_length_of_the_fastest_is_recommended_and_none_where_drafts_do_not_pay():
    from llmctl.cli.bench.sweep import Point, sweep_json
    from llmctl.cli.bench.table import advice

    def sweep(*speeds, rounds=100):
        points = [
            Point(length, speed, 1e3 / speed, 0.1 * length, 0.5, 1.0, (0.5,) * length, rounds)
            for length, speed in enumerate(speeds)
        ]
        return sweep_json(points)

    assert sweep(100, 150, 199, 200)["recommended_draft_len"] == 2
    assert "--draft-len 2 (199 tok/s per user, 1.99 x" in advice(sweep(100, 150, 199, 200))
    assert advice(sweep(100, 90, 99)) == "recommended: no drafts; no draft length is faster"
    assert sweep(100) is None
    assert "99 rounds are too few to be sure" in advice(sweep(100, 150, rounds=99))


def test_a_tree_is_recommended_where_no_length_is_as_fast():
    from llmctl.cli.bench.sweep import Point, sweep_json
    from llmctl.cli.bench.table import advice

    def point(length, speed, tree=None):
        return Point(length, speed, 1e3 / speed, 0.1 * length, 0.5, 1.0, (0.5,) * length, 100, tree)

    def sweep(tree_speed, *lengths):
        points = [point(length, 100 + 10 * length) for length in (0, *lengths)]
        return sweep_json([*points, point(8, 90, "3,2,8"), point(16, tree_speed, "5,3,16")])

    found = sweep(150, 1, 4)
    assert (found["recommended_draft_len"], found["recommended_draft_tree"]) == (16, "5,3,16")
    assert "--draft-tree 5,3,16 (150 tok/s per user, 1.50 x without drafts" in advice(found)
    assert "1.07 x the fastest length)" in advice(found)
    found = sweep(141, 1, 4)
    assert (found["recommended_draft_len"], found["recommended_draft_tree"]) == (4, None)
    assert "0.993 x the fastest tree" in advice(found) or "0.99 x the fastest tree" in advice(found)
    alone = sweep(120)
    assert alone["recommended_draft_tree"] == "5,3,16"
    assert "predicted_tok_s" not in alone["rows"][0] and "cost model" not in advice(alone)
    slow = found | {"recommended_draft_len": 0, "recommended_draft_tree": None}
    assert "no draft length or tree is faster" in advice(slow)
    assert [row["tree"] for row in found["tree_rows"]] == ["3,2,8", "5,3,16"]


def test_a_sweep_measures_trees_beside_lengths(bench, engines, tmp_path):
    path, page = tmp_path / "raw.jsonl", tmp_path / "page.html"
    trees = "1,2,2;2,1,2"
    report, done = bench("latency", "--draft-engine", engines.draft, "--sweep-draft-len", "1,3",
                         "--sweep-draft-tree", trees, "--target-output-len", 96, "--raw", path,
                         "--report", page, "--num-requests", 2)  # fmt: skip
    sweep = report["sweep"]
    assert [row["draft_len"] for row in sweep["rows"]] == [0, 1, 3]
    assert [row["tree"] for row in sweep["tree_rows"]] == trees.split(";")
    assert all(row["decode_tok_s"] > 0 for row in sweep["tree_rows"])
    shown = " ".join(done.err.split())  # where a line ends depends on the figures in it
    assert "recommended:" in shown and "draft length or tree" in shown
    chosen = sweep["recommended_draft_tree"]
    assert report["engine"].get("draft_tree") == chosen
    marks = {line.get("draft_tree") for kind in raw(path) for line in kind}
    assert marks == {None, *trees.split(";")}
    assert "Which draft length or tree" in page.read_text()
    alone, _ = bench("latency", "--draft-engine", engines.draft, "--sweep-draft-tree", "1,2,2",
                     "--target-output-len", 48, "--num-requests", 4)  # fmt: skip
    assert len(alone["sweep"]["rows"]) == len(alone["sweep"]["tree_rows"]) == 1


@pytest.mark.parametrize(
    ("argv", "error", "said"),
    [
        (["--sweep-draft-len", "0..3"], "BadConfig", "1..16 or 1,2,4,8"),
        (["--sweep-draft-len", "many"], "BadConfig", "1..16 or 1,2,4,8"),
        (["--sweep-draft-len", "1..5"], "PairMismatch", "max_draft_len 4"),
        (["--sweep-draft-len", "1..3", "--draft-len", 2], "BadConfig", "both given"),
        (["--sweep-draft-len", "1..3", "--baseline"], "BadConfig", "leave out --baseline"),
        (["--sweep-draft-len", "1..3", "--synthetic-acceptance", 2], "BadConfig", "3 rates"),
        (["--sweep-draft-tree", "1,2"], "BadConfig", "depth,branch,nodes"),
        (["--sweep-draft-tree", "1,2,2", "--draft-tree", "1,2,2"], "BadConfig", "both given"),
        (["--sweep-draft-len", "1..2", "--draft-tree", "1,2,2"], "BadConfig", "both given"),
        (["--sweep-draft-tree", "1,2,2", "--draft-len", 2], "BadConfig", "both given"),
        (["--sweep-draft-tree", "2,2,5"], "PairMismatch", "max_draft_len 4"),
        (["--sweep-draft-tree", "1,2,2;2,2,4"], "PairMismatch", "2,2,4 needs 2 tokens"),
        (["--sweep-draft-tree", "1,2,2", "--synthetic-acceptance", 2], "BadConfig", "of a chain"),
        (["--sweep-draft-tree", "1,2,2", "--baseline"], "BadConfig", "leave out --baseline"),
        (["--synthetic-acceptance", 5.5], "BadConfig", "must be in [1, 5]"),
        (["--synthetic-acceptance", "[0.5]"], "BadConfig", "a list of 4 rates"),
        (["--synthetic-acceptance", "[0.5,0.6,0,0]"], "BadConfig", "none above the one before"),
        (["--draft-target-model-config", "[3,[0],[0],True]", "--synthetic-acceptance", 2],
         "BadConfig", "acceptance by logits"),
    ],
)  # fmt: skip
def test_impossible_sweeps_and_lots_are_refused_by_name(llmctl, engines, argv, error, said):
    done = llmctl("bench", "latency", "--engine-dir", engines.target,
                  "--draft-engine", engines.draft, *argv)  # fmt: skip
    assert done.code and f"error[{error}]" in done.err and said in done.err and done.out == ""


def test_the_load_runs_with_adaptive_drafts_limits_and_a_step_time(bench, drafted):
    work = ["--target-input-len", 40, "--target-output-len", 12, "--num-requests", 4]
    limits = ["--max_batch_size", 2, "--max_num_tokens", 64, "--max-step-ms", "auto"]
    policy = ["--scheduler_policy", "max_utilization"]
    report, _ = bench("throughput", *work, *drafted, "--adaptive-draft-len", *limits, *policy)
    text = str(report)
    assert "max_utilization" in text and "'max_batch_size': 2" in text and "auto" in text


def test_a_sweep_and_adaptive_lengths_contradict(llmctl, engines):
    done = llmctl(
        "bench", "latency", "--engine-dir", engines.target, "--draft-engine", engines.draft,
        "--sweep-draft-len", "1..3", "--adaptive-draft-len",
    )  # fmt: skip
    assert done.code == 2 and "adaptive" in done.err
