"""Rows with a `lookahead_config`, where they are also run without lookahead decoding."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.bench import raw

LOOKAHEAD = ["--lookahead-config", "[3,2,1]"]


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """Two rows, of which the second has a smaller window."""
    path = tmp_path / "rows.jsonl"
    row = {"input_ids": [5, 6, 7, 5, 6], "output_tokens": 8}
    path.write_text("\n".join(map(json.dumps, (row, {**row, "lookahead_config": [2, 2, 1]}))))
    return path


def test_the_reference_of_verify_exact_decodes_a_row_with_a_window(run, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "a b a b", "lookahead_config": [2, 2, 1]}))
    done = run("--input-file", path, *LOOKAHEAD, "--verify-exact")
    assert done.code == 0 and "exact: 12 tokens equal plain decoding" in done.err, done.err


def test_a_baseline_decodes_rows_with_windows(bench, dataset):
    report, _ = bench("latency", "--dataset", dataset, *LOOKAHEAD, "--baseline")
    found = report["baseline"]
    assert found["request_info"]["num_failed"] == report["request_info"]["num_failed"] == 0
    assert found["speedup"]["num_same_outputs"] == found["speedup"]["num_pairs"] == 2


def test_a_sweep_decodes_rows_with_windows_without_drafts_too(bench, dataset, tmp_path):
    path = tmp_path / "raw.jsonl"
    bench("latency", "--dataset", dataset, *LOOKAHEAD, "--sweep-draft-len", "1..2", "--raw", path)
    requests, _ = raw(path)
    assert [item["draft_len"] for item in requests] == [0, 0, 1, 1, 2, 2]
    assert not any(item["error"] for item in requests)


def test_methods_without_a_window_are_compared_with_one_that_has_it(
    llmctl, engines, dataset, tmp_path
):
    """Where none has, the rows ask for what nobody does."""
    folder = tmp_path / "engine"
    build = ["build", "--checkpoint-dir", engines.target_checkpoint, "--output-dir", folder,
             "--max-seq-len", 512, "--max-batch-size", 8, "--max-num-tokens", 128,
             "--speculative-decoding-mode", "lookahead_decoding",
             "--lookahead-config", "[3,2,1]"]  # fmt: skip
    assert llmctl(*build).code == 0
    load = ["--engine-dir", engines.target, "--dataset", dataset, "--json"]
    entries = f"ngram,lookahead={folder}"
    done = llmctl("bench", "latency", *load, "--compare-drafting", entries)
    assert done.code == 0, done.err
    for row in json.loads(done.out)["comparison"]["rows"]:
        assert row["num_same_outputs"] == row["num_pairs"] == 2, row
    done = llmctl("bench", "latency", *load, "--compare-drafting", "ngram")
    assert done.code == 1 and json.loads(done.out)["request_info"]["num_failed"] == 1


def test_windows_are_refused_where_nothing_looks_ahead(llmctl, engines, dataset):
    done = llmctl("bench", "latency", "--engine-dir", engines.target, "--dataset", dataset)
    assert done.code == 1 and json.loads(done.out)["request_info"]["num_failed"] == 1
