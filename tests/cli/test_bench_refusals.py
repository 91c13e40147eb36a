"""`llmctl bench`: what is refused, and a report cut short by Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time

import pytest
from support.bench import raw
from support.bench_runs import SHORT

from llmctl.errors import BadConfig, PromptTooLong


def test_an_end_id_that_no_engine_can_draw_is_refused(llmctl, engines):
    vocab_size = json.loads((engines.target / "config.json").read_text())["pretrained_config"][
        "vocab_size"
    ]
    done = llmctl("bench", "latency", "--engine-dir", engines.target, *SHORT,
                  "--num-requests", 1, "--eos-id", vocab_size)  # fmt: skip
    assert done.code == 2 and f"ids are 0 to {vocab_size - 1}" in done.err


@pytest.mark.parametrize(
    ("argv", "error", "said"),
    [
        (["--target-input-len", 500, "--target-output-len", 20], PromptTooLong, "500 prompt"),
        (["--baseline"], BadConfig, "--baseline is about drafts"),
        (["--num-requests", 3, "--dataset", "DATA"], BadConfig, "has 1 rows"),
        (["--dataset", "DATA", "--target-input-len", 3], BadConfig, "has its own prompts"),
        (["--dataset", "data.csv"], BadConfig, "a .jsonl or .json or .txt file of JSON lines"),
        (["--dataset", "none.jsonl"], BadConfig, "--dataset none.jsonl does not exist"),
        (["--concurrency", 0], BadConfig, "--concurrency is 0"),
        (["--request-rate", 0], BadConfig, "--request-rate is 0"),
        (["--request-rate", 1e-9], BadConfig, "is 1e-09 requests per second, and the last of 10"),
        (["--request-rate", 1e-320], BadConfig, "(0.0025 takes an hour)"),
        (["--raw", "/nowhere/raw.jsonl"], BadConfig, "cannot be written"),
    ],
)
def test_impossible_benchmarks_are_refused_before_anything_runs(
    llmctl, engines, tmp_path, argv, error, said
):
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"input_ids": [5], "output_tokens": 3}))
    words = [data if word == "DATA" else word for word in argv]
    done = llmctl("bench", "throughput", "--engine-dir", engines.target, *words)
    assert done.code == error.exit_code and f"error[{error.__name__}]" in done.err
    assert said in done.err and done.out == ""


def test_more_prompts_than_memory_holds_are_refused_at_once(llmctl, engines):
    for option in ("--num-requests", "--warmup"):
        done = llmctl("bench", "latency", "--engine-dir", engines.target, option, 10**12)
        assert done.code == 2 and f"'{option}'" in done.err and "1000000" in done.err
    done = llmctl("bench", "latency", "--engine-dir", engines.target, "--target-input-len", 10**20)
    assert done.code == 1 and f"row 0 has {10**20} prompt tokens" in done.err


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"input_ids": [5]}, "row 0 of DATA: it has no output_tokens"),
        ({"input_ids": [5], "output_tokens": -2}, "row 0 of DATA: max_tokens is -2"),
        ({"input_ids": [], "output_tokens": 2}, "row 0 of DATA: input_token_ids is empty"),
        ({"input_ids": [5], "output_tokens": 2, "seed": -4}, "row 0 of DATA: seed is -4"),
        ({"input_ids": [99999], "output_tokens": 2}, "row 0 has token id 99999"),
        ({"input_ids": [5] * 600, "output_tokens": 2}, "row 0 has 600 prompt tokens"),
        (
            {"input_ids": [5], "output_tokens": 2, "stop_words": ["a"]},
            "row 0 of DATA: it has stop_words",
        ),
    ],
)
def test_a_bad_row_is_named(llmctl, engines, tmp_path, row, said):
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps(row))
    done = llmctl("bench", "latency", "--engine-dir", engines.target, "--dataset", data)
    assert done.code in (1, 2) and said.replace("DATA", str(data)) in done.err


def test_a_length_that_no_row_takes_is_refused(llmctl, engines, tmp_path):
    data = tmp_path / "data.jsonl"
    rows = [{"input_ids": [5], "output_tokens": 2}, {"input_ids": [5]}]
    words = ("bench", "latency", "--engine-dir", engines.target, "--dataset", data, "--json")
    data.write_text(json.dumps(rows[0]))
    done = llmctl(*words, "--target-output-len", 3)
    assert done.code == 2 and "every row of" in done.out and "leave --target-output-len" in done.out
    data.write_text("\n".join(map(json.dumps, rows)))
    done = llmctl(*words, "--target-output-len", 3)
    assert done.code == 0 and json.loads(done.out)["request_info"]["num_finished"] == 2


def test_a_thousand_requests_show_progress_and_ctrl_c_leaves_a_partial_report(
    program, engines, tmp_path
):
    path = tmp_path / "raw.jsonl"
    argv = ["bench", "throughput", "--engine-dir", engines.target, "--num-requests", 1000,
            "--target-input-len", 16, "--target-output-len", 24, "--raw", path]  # fmt: skip
    process = subprocess.Popen(
        [*program, *map(str, argv)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with process:
        for line in process.stderr:
            if line.startswith("100 of 1,000 requests, "):
                break
        else:
            pytest.fail("no progress")
        os.kill(process.pid, signal.SIGINT)
        began = time.monotonic()
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and time.monotonic() - began < 30
    report = json.loads(out)
    done = report["request_info"]["num_finished"]
    assert report["is_partial"] and 100 <= done < 1000
    assert f"PARTIAL: interrupted; {done} requests had finished" in err
    requests, _ = raw(path)
    assert len(requests) == 1000 and sum(item["is_done"] for item in requests) == done
    finished = [item for item in requests if item["is_done"]]
    total_s = max(i["arrivals"][-1][0] for i in finished) - min(i["submit_s"] for i in finished)
    assert report["performance"]["total_latency_ms"] == pytest.approx(1e3 * total_s)


def test_options_of_trtllm_bench_that_do_not_apply_are_refused_with_a_reason(llmctl, engines):
    for option, said in (
        ("--tp", "llmctl build --tp-size"),
        ("--pp", "parallelism"),
        ("--iteration_log", "--raw writes every step"),
    ):
        done = llmctl("bench", "latency", "--engine_dir", engines.target, option, "x")
        assert done.code == 2 and "error[Unsupported]" in done.err and said in done.err


def test_an_empty_dataset_is_explained_by_the_redirection_that_left_it(llmctl, engines, tmp_path):
    data = tmp_path / "synthetic.txt"
    data.touch()
    done = llmctl("bench", "latency", "--engine-dir", engines.target, "--dataset", data)
    assert done.code == 2 and f"{data} is empty, as `> synthetic.txt` leaves it" in done.err
    assert "fix: llmctl dataset --tokenizer ENGINE_DIR" in done.err
