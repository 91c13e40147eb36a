"""`llmctl run`: files of prompts and results, rows that differ, memory options."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from support.run import TWO, ids


def test_files_in_and_out_agree_with_stdout(run, tmp_path: Path):
    (tmp_path / "in.txt").write_text("def add(a, b):\nclass Bar:\n")
    names = {name: tmp_path / f"out.{name}" for name in ("csv", "npy", "jsonl")}
    files = [word for name, path in names.items() for word in (f"--output_{name}", path)]
    files += ["--output_log_probs_npy", tmp_path / "l.npy"]
    files += ["--output_cum_log_probs_npy", tmp_path / "c.npy"]
    done = run("--input_file", tmp_path / "in.txt", *files, "--json")
    found = json.loads(done.out)["outputs"]
    rows = [json.loads(line) for line in names["jsonl"].read_text().splitlines()]
    assert rows == found
    assert [list(map(int, line.split(","))) for line in names["csv"].read_text().split()] == ids(
        found
    )
    npy = np.load(names["npy"])
    for row, wanted in zip(npy, ids(found), strict=True):
        assert row[: len(wanted)].tolist() == wanted
    log_probs, totals = np.load(tmp_path / "l.npy"), np.load(tmp_path / "c.npy")
    assert totals.shape == (2, 1)
    np.testing.assert_allclose(np.nansum(log_probs, axis=1), totals[:, 0], rtol=1e-5)
    assert (log_probs[~np.isnan(log_probs)] <= 0).all()


def test_outputs_of_one_run_are_prompts_of_the_next(run, outputs, tmp_path: Path):
    run(*TWO, "--output_csv", tmp_path / "x.csv", "--output_npy", tmp_path / "x.npy", tokens=4)
    from_csv = outputs("--input-file", tmp_path / "x.csv")
    assert [item["num_prompt_tokens"] for item in from_csv] == [4, 4]
    assert ids(from_csv) == ids(outputs("--input-file", tmp_path / "x.npy"))


def test_a_jsonl_row_overrides_the_command_line(outputs, tmp_path: Path):
    rows = [
        {"prompt": "x ="},
        {"prompt": "x =", "max_tokens": 3},
        {"prompt": "x =", "temperature": 3.0, "seed": 4},
    ]
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, rows)))
    flags = ["--end-id", "-1"]
    plain, short, sampled = ids(outputs("--input_file", tmp_path / "x.jsonl", *flags))
    assert short == plain[:3]
    wanted = ["--input-text", "x =", "--temperature", "3", "--random_seed", "4", *flags]
    assert [sampled] == ids(outputs(*wanted)) != [plain]


def test_a_prompt_that_is_too_long_is_refused_and_the_others_finish(run, tmp_path: Path):
    (tmp_path / "x.jsonl").write_text(
        json.dumps({"input_ids": [5] * 600}) + "\n" + json.dumps({"prompt": "x ="})
    )
    done = run("--input_file", tmp_path / "x.jsonl", "--output_csv", tmp_path / "x.csv")
    assert done.code == 1
    assert "error[PromptTooLong]: Text 0: " in done.err and "Output [Text 1 Beam 0]" in done.out
    refused, finished = (tmp_path / "x.csv").read_text().split("\n")[:2]
    assert refused == "" and finished
    cut = run("--input_file", tmp_path / "x.jsonl", "--max_input_length", "100")
    assert cut.code == 0 and "Output [Text 0 Beam 0]" in cut.out


def test_an_empty_prompt_and_a_foreign_token_id_are_refused_by_row(run, tmp_path: Path):
    rows = [{"prompt": ""}, {"input_ids": [999999]}, {"prompt": "x", "top_p": 2.0}, {"prompt": "x"}]
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, rows)))
    done = run("--input_file", tmp_path / "x.jsonl")
    assert done.code == 1
    for index in range(3):
        assert f"error[BadConfig]: Text {index}: " in done.err
    assert done.err.count("fix: correct this prompt") == 3
    assert "Output [Text 3 Beam 0]" in done.out


def test_a_limit_cut_by_the_engine_is_reported(run):
    done = run("--input-text", "x =", "--end-id", "-1", tokens=5000)
    assert done.code == 0 and "max_seq_len 512" in done.err
    assert "Text 0: its limit of 5000 tokens was cut to " in done.err


def test_chat_wraps_the_prompt_in_the_template(outputs, engines):
    from llmctl.cli.tokenizer import Tokenizer

    found = outputs("--input-text", "hi", "--chat")
    wanted = Tokenizer(engines.target / "tokenizer").chat_prompt("hi")
    assert found[0]["num_prompt_tokens"] == len(wanted) and found[0]["prompt"] == "hi"


def test_another_tokenizer_may_be_named_with_a_word_if_it_differs(
    run, engines, tmp_path, make_tokenizer
):
    same = make_tokenizer(tmp_path / "same")
    assert "differs" not in run(*TWO, "--tokenizer_dir", same).err
    text = json.loads((same / "tokenizer.json").read_text())
    text["pre_tokenizer"]["add_prefix_space"] = True
    (same / "tokenizer.json").write_text(json.dumps(text))
    assert "differs" in run(*TWO, "--tokenizer_dir", same).err


def test_memory_and_scheduling_options_change_no_token(outputs):
    plain = ids(outputs(*TWO))
    for flags in (
        ["--no-kv-cache-enable-block-reuse"],
        ["--kv_cache_enable_block_reuse", "--kv_cache_free_gpu_memory_fraction", "0.1"],
        ["--max_tokens_in_paged_kv_cache", "128"],
        ["--no-enable-chunked-context"],
        ["--enable_chunked_context", "--num_threads", "1"],
        ["--scheduler_policy", "max_utilization", "--max_tokens_in_paged_kv_cache", "128"],
        ["--scheduler-policy", "static_batch", "--context-chunking-policy", "equal_progress"],
    ):
        assert ids(outputs(*TWO, *flags)) == plain, flags


def test_adaptive_draft_lengths_change_no_token_and_need_a_draft(outputs, run, engines):
    plain = ids(outputs(*TWO))
    draft = ["--draft-engine", engines.draft, "--adaptive-draft-len"]
    assert ids(outputs(*TWO, *draft)) == plain
    assert ids(outputs(*TWO, "--ngram-config", "[4,2,[0]]", "--adaptive-draft-len")) == plain
    assert run(*TWO, "--adaptive-draft-len").code == 2


def test_a_cache_bound_shows_in_the_memory_plan(run):
    done = run(*TWO, "--max_tokens_in_paged_kv_cache", "128")
    assert "KV cache: 4 blocks of 32 tokens" in done.err and "max_tokens" in done.err


def test_the_error_of_a_prompt_has_the_same_fix_in_json_as_on_stderr(run, tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "x", "max_tokens": 0}\n')
    told = run("--input-file", path).err
    (output,) = json.loads(run("--input-file", path, "--json").out)["outputs"]
    assert output["error"]["fix"].startswith("correct this prompt")
    assert f"fix: {output['error']['fix']}\n" in told
