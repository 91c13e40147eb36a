"""`llmctl run --typical-acceptance`: asked for by name, labelled, refused where it is in vain."""

from __future__ import annotations

import json

import pytest

SAMPLED = ["--input-text", "a b c", "x =", "--max-output-len", "24", "--temperature", "1.5"]
TYPICAL = ["--typical-acceptance", "0.5,0.9"]


@pytest.fixture
def drafting(engines) -> list[object]:
    return ["--draft-engine", engines.draft]


def test_output_is_labelled_lossy(run, drafting):
    done = run(*SAMPLED, *drafting, *TYPICAL)
    assert done.code == 0 and "lossy: 2 of 2 requests" in done.err
    done = run(*SAMPLED, *drafting, *TYPICAL, "--json")
    found = json.loads(done.out)
    assert [output["is_lossy"] for output in found["outputs"]] == [True, True]
    speculation = found["stats"]["speculation"]
    assert speculation["is_lossy"] and speculation["accepted_by"] == {"typical": 2}


def test_without_it_nothing_is_lossy(run, drafting):
    done = run(*SAMPLED, *drafting)
    assert done.code == 0 and "lossy" not in done.err
    found = json.loads(run(*SAMPLED, *drafting, "--json").out)
    assert not any("is_lossy" in output for output in found["outputs"])
    speculation = found["stats"]["speculation"]
    assert not speculation["is_lossy"] and speculation["accepted_by"] == {"tokens": 2}


def test_acceptance_by_logits_is_labelled_too(run, drafting):
    config = ["--draft-target-model-config", "[4,[0],[0],True]"]
    done = run(*SAMPLED, *drafting, *config)
    assert done.code == 0 and "by logits: 2 of 2 requests" in done.err


def test_a_row_asks_for_itself(run, drafting, tmp_path):
    rows = [
        {"prompt": "a b c", "temperature": 1.5, "typical_acceptance": "auto"},
        {"prompt": "x =", "temperature": 1.5},
        {"prompt": "x ="},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    options = ["--input-file", path, "--max-output-len", "24", *drafting]
    found = json.loads(run(*options, "--json").out)
    assert [output.get("is_lossy") for output in found["outputs"]] == [True, None, None]
    assert found["stats"]["speculation"]["accepted_by"] == {"tokens": 2, "typical": 1}
    for row in range(1, 3):  # what did not ask is exact
        alone = tmp_path / f"{row}.jsonl"
        alone.write_text(json.dumps(rows[row]))
        options = ["--input-file", alone, "--max-output-len", "24", "--json"]
        (plain,) = json.loads(run(*options).out)["outputs"]
        assert plain["token_ids"] == found["outputs"][row]["token_ids"]


@pytest.mark.parametrize(
    ("flags", "has_draft", "what"),
    [
        (TYPICAL, False, "--typical-acceptance is about drafts"),
        ([*TYPICAL, "--temperature", "0"], True, "all are greedy"),
        ([*TYPICAL, "--verify-exact"], True, "accepted typically"),
        ([*TYPICAL, "--draft-target-model-config", "[4,[0],[0],True]"], True, "both requested"),
        (["--typical-acceptance", "0.09"], True, "THRESHOLD,ALPHA"),
        (["--typical-acceptance", "0.09,x"], True, "THRESHOLD,ALPHA"),
        (["--typical-acceptance", "nan,0.3"], True, "THRESHOLD,ALPHA"),
        (["--typical-acceptance", "0,0.3"], True, "typical threshold is 0"),
        (["--typical-acceptance", "0.09,2"], True, "typical alpha is 2"),
        (["--eagle-posterior-threshold", "0.09"], True, "--typical-acceptance THRESHOLD,ALPHA"),
    ],
)
def test_where_it_has_no_effect_it_is_refused(run, drafting, flags, has_draft, what):
    done = run(*SAMPLED, *(drafting if has_draft else []), *flags)
    assert done.code == 2 and what in done.err, done.err


def test_a_benchmark_row_that_asks_is_refused(llmctl, engines, tmp_path):
    path = tmp_path / "rows.jsonl"
    row = {"input_ids": [5], "output_tokens": 3, "typical_acceptance": "auto"}
    path.write_text(json.dumps(row))
    done = llmctl("bench", "latency", "--engine-dir", engines.target, "--dataset", path)
    assert done.code != 0 and "typical_acceptance; a benchmark has not" in done.err
