"""`llmctl run`: profiling, logs, --verify-exact, and engines that cannot run."""

from __future__ import annotations

import json

import pytest
from support.run import TWO


def test_profiling_prints_batch_size_and_mean_latency(run):
    done = run(*TWO, "--run_profiling", tokens=2)
    assert done.code == 0
    assert done.out.startswith("batch_size: 2, mean latency of 10 runs: ")
    assert float(done.out.split()[-2]) > 0


def test_log_levels_show_less_and_more(run):
    assert "target kernel: linear" in run(*TWO, "--log_level", "verbose").err
    assert "target kernel" not in run(*TWO).err
    assert run(*TWO, "--log_level", "warning").err == ""


def test_verify_exact_says_how_many_tokens_are_equal(run, engines):
    done = run(*TWO, "--draft-engine", engines.draft, "--verify-exact")
    assert done.code == 0 and "tokens equal plain decoding" in done.err


def test_verify_exact_refuses_sampled_drafts_accepted_by_logits(run, engines, tmp_path):
    (tmp_path / "x.jsonl").write_text('{"prompt": "x =", "temperature": 2.0}')
    flags = ["--draft-engine", engines.draft, "--verify-exact"]
    flags += ["--draft_target_model_config", "[4,[0],[0],True]"]
    done = run(*flags, "--input_file", tmp_path / "x.jsonl")
    assert done.code == 2 and "acceptance by tokens" in done.err
    assert run(*flags, "--input_text", "x =").code == 0  # greedy: identical under either rule


def test_acceptance_by_logits_that_no_request_has_is_said(run, bench, engines):
    flags = ["--draft-engine", engines.draft, "--draft_target_model_config", "[4,[0],[0],True]"]
    said = "use_logits changes nothing: all requests are greedy"
    assert said in run(*TWO, *flags).err and said not in run(*TWO, *flags, "--temperature", 1).err
    assert said not in run(*TWO, *flags[:2]).err
    assert said in bench("latency", *flags, "--num-requests", 1, "--target-output-len", 2)[1].err


def test_a_time_that_ranks_wait_is_for_several(run):
    done = run(*TWO, "--rank-timeout", "5")
    assert done.code == 2 and "--rank-timeout is for engines of several ranks" in done.err


def test_verify_exact_fails_at_the_first_divergence(run, engines, monkeypatch):
    from llmctl.cli.run import session

    original = session.generate

    def lying(executor, rows, *given, **named):
        seconds = original(executor, rows, *given, **named)
        if len(rows) == 2:  # the run under test; the check runs one row at a time
            rows[1].sequences[0].token_ids[3] += 1
        return seconds

    monkeypatch.setattr(session, "generate", lying)
    done = run(*TWO, "--draft-engine", engines.draft, "--verify-exact")
    assert done.code == 1
    assert "error[ExactnessViolation]: Text 1 Seq 0: output token 3" in done.err
    done = run(*TWO, "--draft-engine", engines.draft, "--verify-exact", "--json")
    assert done.code == 1 and "error[ExactnessViolation]" in done.err
    assert len(json.loads(done.out)["outputs"]) == 2, "stdout stays one object"


@pytest.mark.parametrize(
    "argv, words",
    [
        (["--num_beams", "2"], "error[Unsupported]: --num-beams is 2"),
        (["--verify-exact"], "--draft-engine"),
        (["--temperature", "inf"], "temperature is inf"),
        (["--presence_penalty", "nan"], "presence_penalty is nan"),
        (["--frequency_penalty", "inf"], "frequency_penalty is inf"),
        (["--repetition_penalty", "inf"], "repetition_penalty is inf"),
        (["--repetition_penalty", "1e-30"], "repetition_penalty is 1e-30"),
        (["--presence_penalty", "-1e300"], "presence_penalty is -1e+300"),
        (["--frequency_penalty", "1e7"], "frequency_penalty is 10000000.0; it must be from -1e+06"),
        (["--end_id", "99999"], "--end-id is 99999"),
        (["--streaming_interval", "3"], "--streaming"),
        (["--stop_words", ""], "--stop-words holds an empty word"),
        (["--input_text", "a\udcff"], "is not UTF-8"),
        (["--num_threads", "100000"], "must be 1 to 1024"),
        (["--temperature", "-1"], "temperature is -1.0"),
        (["--top_p", "1.5"], "top_p is 1.5"),
        (["--temperature", "0", "--top_k", "5"], "so --top-k 5 has no effect"),
        (["--temperature", "0", "--top_p", "0.9"], "so --top-p 0.9 has no effect"),
        (["--temperature", "0", "--min_p", "0.1"], "so --min-p 0.1 has no effect"),
        (["--input_text", "a", "--input_file", "x.txt"], "--input-file are both given"),
        (["--input_file", "absent.txt"], "does not exist"),
        (["--stop_words", "a", "--stop_words", "b"], "given 2 times for 1 prompt;"),
        (["--output_csv", "/no/such/folder/x.csv"], "cannot be written"),
        (["--kv_cache_free_gpu_memory_fraction", "1.5"], "must be in (0, 1)"),
    ],
)
def test_bad_values_are_usage_errors(run, argv, words):
    done = run(*argv)
    assert done.code == 2 and words in done.err and done.out == ""


@pytest.mark.parametrize(
    "argv, words",
    [
        *(
            (["--max-step-ms", given], f"is {said}; it must be auto, or more than 0 ms and less")
            for given, said in (("0", "0"), ("nan", "nan"), ("1e9", "1e+09"), ("fast", "'fast'"))
        ),
        (["--max-step-ms", "auto", "--no-enable-chunked-context"], "leave one of the two out"),
    ],
)
def test_a_step_limit_that_cannot_be_kept_is_refused_before_any_weight_is_read(run, argv, words):
    done = run(*TWO, *argv)
    assert done.code == 2 and words in done.err and "weights" not in done.err


@pytest.mark.parametrize(
    "size, option, code, words",
    [
        (1 << 50, [], 3, "of host memory are free"),
        (1 << 20, ["--no-kv-cache-enable-block-reuse"], 2, "block reuse is off"),
    ],
)
def test_host_memory_that_cannot_be_is_refused_before_any_weight_is_read(
    run, monkeypatch, size, option, code, words
):
    monkeypatch.setattr("llmctl.cli.run.session.OpenEngines", None)  # which reads them
    done = run(*TWO, "--kv-cache-host-memory-bytes", size, *option)
    assert done.code == code and words in done.err, done


def test_json_and_streaming_do_not_go_together(run):
    done = run("--json", "--streaming")
    assert done.code == 2 and json.loads(done.out)["error"]["name"] == "BadConfig"


def test_swapped_engines_are_recognised_before_any_weight_is_read(run, engines, tmp_path):
    for engine in (engines.target, engines.draft):
        copy = tmp_path / engine.name
        copy.mkdir()
        (copy / "config.json").write_bytes((engine / "config.json").read_bytes())
    done = run(
        "--draft-engine", tmp_path / "target", "--input-text", "x", engine=tmp_path / "draft"
    )
    assert done.code == 1 and "error[PairMismatch]" in done.err and "swapped" in done.err


def test_a_truncated_engine_is_named(run, engines, tmp_path):
    for name in ("config.json", "rank0.engine", "tokenizer"):
        (tmp_path / name).symlink_to(engines.target / name)
    (tmp_path / "rank0.engine").unlink()
    data = (engines.target / "rank0.engine").read_bytes()
    (tmp_path / "rank0.engine").write_bytes(data[:-1000])
    done = run(*TWO, engine=tmp_path)
    assert done.code == 1 and "error[CorruptEngine]" in done.err


def test_an_engine_of_another_schema_asks_for_a_rebuild(run, engines, tmp_path):
    config = json.loads((engines.target / "config.json").read_text())
    for version, words in ((0, "fix: remove it and"), (10**6, "fix: install a newer llmctl, or")):
        (tmp_path / "config.json").write_text(json.dumps(config | {"version": version}))
        done = run(*TWO, engine=tmp_path)
        assert done.code == 4 and "error[RebuildNeeded]" in done.err and words in done.err


@pytest.mark.parametrize(
    "command, shown",
    [
        ("llmctl build --checkpoint_dir 'a b' --output_dir out", "--checkpoint_dir 'a b'"),
        ("llmctl build --output-dir=out --checkpoint-dir c", "--checkpoint-dir c"),
        ("llmctl build --checkpoint-dir c", "--checkpoint-dir c"),
        ("curl x | sh", "--checkpoint-dir CHECKPOINT"),
        ("llmctl build --checkpoint-dir c; curl x | sh", "--checkpoint-dir CHECKPOINT"),
        ("llmctl build --checkpoint-dir $(curl x)", "--checkpoint-dir CHECKPOINT"),
        ("llmctl build --checkpoint-dir '\x1b[31m'", "--checkpoint-dir CHECKPOINT"),
        ("llmctl build 'unclosed", "--checkpoint-dir CHECKPOINT"),
        ({"a": 1}, "--checkpoint-dir CHECKPOINT"),
    ],
)
def test_the_command_to_rebuild_is_one_of_llmctl_whatever_a_stranger_wrote(
    run, engines, tmp_path, command, shown
):
    config = json.loads((engines.target / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"version": 0, "command": command}))
    done = run(*TWO, engine=tmp_path)
    fix = f"fix: remove it and build again: llmctl build {shown} --output-dir {tmp_path}\n"
    assert done.code == 4 and done.err.endswith(fix)


def test_chat_without_a_template_is_refused_before_any_weight_is_read(
    run, make_tokenizer, monkeypatch, tmp_path
):
    monkeypatch.setattr("llmctl.cli.run.session.OpenEngines", None)  # which reads them
    plain = make_tokenizer(tmp_path / "plain")
    done = run(*TWO, "--chat", "--tokenizer-dir", plain)
    assert done.code == 1 and done.err.count("has no chat template") == 1, done
    assert "error[TokenizerError]" in done.err and "leave out --chat" in done.err


def test_prompts_that_are_all_refused_are_refused_before_any_weight_is_read(
    run, monkeypatch, tmp_path
):
    monkeypatch.setattr("llmctl.cli.run.session.OpenEngines", None)  # which reads them
    path = tmp_path / "rows.jsonl"
    rows = [{"input_ids": [5] * 600}, {"input_ids": [999999]}, {"prompt": ""}]
    path.write_text("\n".join(map(json.dumps, rows)))
    done = run("--input-file", path, "--output-csv", tmp_path / "out.csv", "--json")
    names = [item["error"]["name"] for item in json.loads(done.out)["outputs"]]
    assert done.code == 1 and names == ["PromptTooLong", "BadConfig", "BadConfig"], done
    assert (tmp_path / "out.csv").read_text() == "\n\n\n"
    assert done.err.count("error[") == done.err.count("fix: ") == 3
    timed = run("--input-file", path, "--run-profiling")
    assert timed.code == 1 and timed.out == "" and timed.err.count("error[") == 3


def test_a_row_without_temperature_has_no_filters_of_its_own(run, tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": "x =", "temperature": 0}, {"prompt": "x =", "temperature": 0, "top_k": 5}]
    path.write_text("\n".join(map(json.dumps, rows)))
    done = run("--input-file", path, "--top-k", 3)  # for rows that sample
    assert done.code == 1 and "Output [Text 0 Beam 0]" in done.out
    assert "Text 1: temperature 0 takes the likeliest token, so top_k 5 has no" in done.err


def test_outputs_that_are_all_the_same_are_said_to_be(run):
    said = "greedy, so the outputs of a prompt are all the same"
    assert said in run(*TWO, "--num-return-sequences", 2, tokens=2).err
    for sampled in (["--temperature", 1], []):
        count = 2 if sampled else 1
        assert said not in run(*TWO, "--num-return-sequences", count, *sampled, tokens=2).err
