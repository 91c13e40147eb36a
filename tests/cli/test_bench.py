"""`llmctl bench` on real engines of random weights; figures recomputed from the raw records."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from support.bench import raw
from support.bench_runs import SHORT

from llmctl.runtime.api.executor import Executor


def spread(values):
    """p50 to p99, minimum, maximum and mean as the report defines them."""
    ordered = np.sort(np.asarray(values, float))
    found = {f"p{p}": ordered[len(ordered) * p // 100] for p in (50, 90, 95, 99)}
    return found | {"minimum": ordered[0], "maximum": ordered[-1], "average": ordered.mean()}


def same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name] == pytest.approx(value, rel=1e-9, abs=1e-9), name


@pytest.mark.parametrize("command", ["latency", "throughput"])
def test_every_figure_can_be_recomputed_from_the_raw_records(bench, drafted, tmp_path, command):
    path = tmp_path / "raw.jsonl"
    report, _ = bench(command, *drafted, *SHORT, "--num-requests", 7, "--iterations", 2,
                      "--raw", path)  # fmt: skip
    requests, steps = raw(path)
    assert len(requests) == 14 and {item["draft_len"] for item in requests} == {3}
    times = [np.array([at for at, _ in item["arrivals"]]) for item in requests]
    submit = np.array([item["submit_s"] for item in requests])
    first, last = np.array([t[0] for t in times]), np.array([t[-1] for t in times])
    counts = np.array([len(item["output_ids"]) for item in requests])
    assert all(counts == 9)

    streaming = report["streaming_metrics"]
    same(streaming["ttft_ms"], spread(1e3 * (first - submit)))
    same(streaming["e2e_ms"], spread(1e3 * (last - submit)))
    spans = (last - first)[last > first]  # what comes all at once, to a late reader, has no rate
    same(streaming["tpot_ms"], spread(1e3 * spans / 8))
    rated = np.array([len(np.unique(t)) > 2 for t in times])  # see DEFINITIONS; late readers again
    same(streaming["gen_tok_s"], spread(8 / (last - first)[rated]))
    same(streaming["itl_ms"], spread(1e3 * np.concatenate([np.diff(t) for t in times])))

    per_iteration = []
    for number in (0, 1):
        chosen = np.array([item["iteration"] == number for item in requests])
        total = last[chosen].max() - submit[chosen].min()
        per_iteration.append(
            {
                "total_latency_ms": 1e3 * total,
                "request_throughput_req_s": 7 / total,
                "system_output_throughput_tok_s": 63 / total,
                "system_total_throughput_tok_s": (63 + 7 * 12) / total,
                "output_throughput_per_user_tok_s": np.mean(9 / (last - submit)[chosen]),
                "avg_concurrent_requests": (last - submit)[chosen].sum() / total,
            }
        )
    performance = report["performance"]
    for name, value in per_iteration[0].items():
        found = [item[name] for item in performance["iterations"]]
        assert found == pytest.approx([value, per_iteration[1][name]])
        assert performance[name] == pytest.approx(np.mean(found))  # the median of two
    assert performance["output_throughput_per_gpu_tok_s"] is None

    rounds = np.array([item[1:] for step in steps for item in step["rounds"]])
    drafts, accepted, tokens, depths = rounds.T
    assert (depths == drafts).all(), "chains"
    decoding = report["decoding_stats"]
    assert decoding["acceptance_length"] == pytest.approx(1 + accepted.mean())
    assert decoding["acceptance_rate"] == pytest.approx(accepted.sum() / drafts.sum())
    assert tokens.sum() == counts.sum() - 14  # each prompt's step emits the first token
    for i, share in enumerate(decoding["acceptance_at_position"]):
        assert share == pytest.approx(np.mean(accepted[drafts > i] > i))
    assert sum(decoding["tokens_per_round"].values()) == len(rounds)

    plain = [step for step in steps if not step["context_requests"]]
    for name in ("step", "draft", "verify"):
        same(report["round_times"][f"{name}_ms"], spread([step[f"{name}_ms"] for step in plain]))
    used = np.array([step["kv_used_blocks"] / step["kv_max_blocks"] for step in steps])
    assert report["kv_cache"]["peak_used_share"] == pytest.approx(used.max())
    sizes = [step["context_tokens"] + sum(1 + r[1] for r in step["rounds"]) for step in steps]
    same(report["steps"]["step_tokens"], spread(sizes))
    for item in report["steps"]["step_size_histogram"]:
        assert item["steps"] == sum(item["least"] <= size <= item["most"] for size in sizes)


def test_the_table_shows_the_figures_of_the_json_line_with_their_units(bench, drafted):
    report, done = bench("throughput", *drafted, *SHORT)
    row = re.search(r"^time to first token \(TTFT\) +ms +(.*)$", done.err, re.M)
    shown = [float(word.replace(",", "")) for word in row[1].split()]
    found = report["streaming_metrics"]["ttft_ms"]
    assert shown == pytest.approx(list(found.values()), rel=1e-3)
    speed = re.search(r"^output, system +([\d.,]+) +tok/s", done.err, re.M)
    wanted = report["performance"]["system_output_throughput_tok_s"]
    assert float(speed[1].replace(",", "")) == pytest.approx(wanted, rel=1e-3)
    rows = [line for line in done.err.splitlines() if re.search(r"\d$", line.strip())]
    units = r"\b(ms|ms/step|s|tok/s|req/s|tokens|tokens/round|requests|%)\b"
    assert rows and all(re.search(units, line) for line in rows), rows


def test_latency_has_one_request_in_flight_and_throughput_all(bench, tmp_path):
    path = tmp_path / "raw.jsonl"
    report, _ = bench("latency", *SHORT, "--raw", path)
    assert {step["active_requests"] for step in raw(path)[1]} == {1}
    assert report["performance"]["avg_concurrent_requests"] <= 1 + 1e-9
    report, _ = bench("throughput", *SHORT, "--raw", path)
    requests, steps = raw(path)
    assert len({item["submit_s"] for item in requests}) == 1
    assert max(len(step["rounds"]) for step in steps) == 8  # the engine's batch
    assert max(step["active_requests"] for step in steps) == 10
    # Of times that readers note: how much above one depends on how late they are.
    assert report["performance"]["avg_concurrent_requests"] > 1


def test_concurrency_bounds_the_requests_in_flight(bench, tmp_path):
    path = tmp_path / "raw.jsonl"
    report, _ = bench("throughput", *SHORT, "--concurrency", 3, "--raw", path)
    requests, steps = raw(path)
    assert max(step["active_requests"] + step["queued_requests"] for step in steps) == 3
    assert report["load"]["concurrency"] == 3 and len(requests) == 10


def test_poisson_arrivals_follow_the_rate_and_the_seed(bench, tmp_path):
    path = tmp_path / "raw.jsonl"
    argv = ["--target-input-len", 4, "--target-output-len", 2, "--num-requests", 60]
    report, done = bench("throughput", *argv, "--request-rate", 300, "--raw", path)
    assert "60 of 60 requests finished, 300 requests/s sent, " in " ".join(done.err.split())
    requests, _ = raw(path)
    due = np.array([item["due_s"] for item in requests])
    late = np.array([item["submit_s"] for item in requests]) - due
    assert due[0] == 0 and np.all(np.diff(due) > 0) and np.all(late >= 0)
    gaps = np.random.default_rng(0).exponential(1 / 300, 60)[:59]
    assert np.diff(due) == pytest.approx(gaps)
    submits = np.array([item["submit_s"] for item in requests])
    rate = 59 / (submits[-1] - submits[0])
    assert report["performance"]["issue_rate_req_s"] == pytest.approx(rate)


def test_a_dataset_is_run_row_by_row(bench, llmctl, engines, tmp_path):
    data, path = tmp_path / "data.jsonl", tmp_path / "raw.jsonl"
    made = llmctl("dataset", "--tokenizer", engines.target, "--output", data, "token-unif-dist",
                  "--num-requests", 6, "--input-min", 3, "--input-max", 30, "--output-min", 2,
                  "--output-max", 8)  # fmt: skip
    assert made.code == 0
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    report, _ = bench("throughput", "--dataset", data, "--num-requests", 5, "--raw", path)
    requests, _ = raw(path)
    assert [item["input_tokens"] for item in requests] == [len(r["input_ids"]) for r in rows[:5]]
    assert [len(item["output_ids"]) for item in requests] == [r["output_tokens"] for r in rows[:5]]
    assert report["load"]["dataset"] == str(data)


def test_text_prompts_are_tokenized_with_the_engines_tokenizer(bench, tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"task_id": 0, "prompt": "def add(a, b):", "output_tokens": 3}))
    report, _ = bench("latency", "--dataset", data)
    assert report["request_info"]["output_tokens"] == 3
    assert 3 < report["request_info"]["input_tokens"] < 14


def test_the_baseline_runs_the_same_requests_without_drafts(bench, drafted, tmp_path):
    path = tmp_path / "raw.jsonl"
    report, done = bench("latency", *drafted, *SHORT, "--baseline", "--iterations", 2,
                         "--raw", path)  # fmt: skip
    requests, _ = raw(path)
    sides = [[r for r in requests if r["draft_len"] == k] for k in (3, 0)]
    assert [r["output_ids"] for r in sides[0]] == [r["output_ids"] for r in sides[1]]
    speedup = report["baseline"]["speedup"]
    assert (speedup["num_same_outputs"], speedup["num_pairs"]) == (20, 20)
    ends = [[max(r["arrivals"][-1][0] for r in side if r["iteration"] == n) for n in (0, 1)]
            for side in sides]  # fmt: skip
    ratios = np.divide(ends[1], ends[0])
    assert speedup["total_time_ratio"] == pytest.approx(np.mean(ratios))
    assert report["baseline"]["decoding_stats"] is None
    shown = " ".join(done.err.split())  # where a line ends depends on the figures in it
    assert "x as fast as without" in shown and "20 of 20 outputs" in shown


def test_drafts_can_come_from_the_text_itself(bench):
    report, _ = bench("latency", *SHORT, "--ngram-config", "[4,2,[0]]", "--num-requests", 2)
    assert report["engine"]["draft_method"] == "n-gram" and report["engine"]["draft_len"] == 4


def test_sampled_outputs_repeat_by_seed(bench, tmp_path):
    outputs = []
    for seed in (5, 5, 6):
        bench("latency", *SHORT, "--temperature", 2, "--random-seed", seed, "--raw",
              tmp_path / "raw.jsonl")  # fmt: skip
        outputs.append([item["output_ids"] for item in raw(tmp_path / "raw.jsonl")[0]])
    assert outputs[0] == outputs[1] != outputs[2]


def test_an_end_id_ends_outputs_early(bench, tmp_path):
    path = tmp_path / "raw.jsonl"
    bench("latency", *SHORT, "--num-requests", 1, "--raw", path)
    (request,), _ = raw(path)
    end = request["output_ids"][3]
    report, _ = bench("latency", *SHORT, "--num-requests", 1, "--eos-id", end)
    assert report["request_info"]["output_tokens"] == request["output_ids"].index(end) + 1


def test_json_leaves_stderr_alone_and_the_file_repeats_the_line(bench, tmp_path):
    path = tmp_path / "report.json"
    report, done = bench("latency", *SHORT, "--json", "--report-json", path)
    assert done.err == "" and json.loads(path.read_text()) == report


@pytest.mark.parametrize(
    ("label", "is_known"),
    [("target-hf", True), ("hub/Target-HF", True), ("meta-llama/Llama-3.3-70B-Instruct", False)],
)
def test_a_label_that_the_origin_is_not_is_remarked_and_changes_nothing(
    llmctl, engines, label, is_known
):
    done = llmctl("bench", "--model", label, "latency", "--engine-dir", engines.target, *SHORT,
                  "--num-requests", 1)  # fmt: skip
    assert done.code == 0, done.err
    said = f"warning: --model {label} is a label; the engine measured was built from"
    assert (said in done.err) is not is_known
    assert json.loads(done.out)["engine"]["label"] == label


def test_graphs_that_are_captured_in_a_load_are_counted_and_remarked(bench, monkeypatch):
    report, done = bench("latency", *SHORT, "--num-requests", 1)
    assert report["graphs_captured_in_load"] == 0 and "were captured" not in done.err
    counts = iter((3, 8))
    monkeypatch.setattr(Executor, "num_graphs_captured", property(lambda executor: next(counts)))
    report, done = bench("latency", *SHORT, "--num-requests", 1)
    assert report["graphs_captured_in_load"] == 5
    assert "5 CUDA graphs were captured while requests ran" in " ".join(done.err.split())


def test_a_load_that_waits_for_the_engines_limit_is_told_what_to_build(bench, drafted):
    load = ["--num-requests", 24, "--target-input-len", 12, "--target-output-len", 6]
    load += ["--warmup", 0]
    report, done = bench("throughput", *load)
    assert report["engine"]["max_batch_size"] == 8
    said = " ".join(done.err.split())
    assert "24 requests were to run at once, and the engine takes 8, which held" in said
    assert "Built with --max-batch-size 24 it would run more of them together" in said
    said = " ".join(bench("throughput", *load, *drafted)[1].err.split())
    assert "Built, the draft engine too, with --max-batch-size 24" in said
    for chosen in (["--concurrency", 8], ["--max-batch-size", 8], ["--request-rate", 1000]):
        assert "it would run more" not in " ".join(
            bench("throughput", *load, *chosen)[1].err.split()
        )
