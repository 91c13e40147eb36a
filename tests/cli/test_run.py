"""`llmctl run` on real engines of random weights: one path of every option."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

TWO = ["--input_text", "def add(a, b):", "class Bar:"]


@pytest.fixture
def run(llmctl, engines):
    def call(*argv, engine=None, tokens=12):
        return llmctl(
            "run", "--engine_dir", engine or engines.target, "--max_output_len", tokens, *argv
        )

    return call


@pytest.fixture
def outputs(run):
    """The outputs of a run as JSON objects."""

    def call(*argv, **options):
        done = run(*argv, "--json", "--log_level", "error", **options)
        assert done.code == 0, done
        return json.loads(done.out)["outputs"]

    return call


def ids(found):
    return [item["token_ids"] for item in found]


def test_text_goes_in_and_comes_out_on_stdout_alone(run):
    done = run(*TWO)
    lines = done.out.split("\n")
    assert done.code == 0
    assert lines[0] == 'Input [Text 0]: "def add(a, b):"'
    assert lines[1].startswith('Output [Text 0 Beam 0]: "')
    assert 'Input [Text 1]: "class Bar:"' in lines
    assert "tok/s" in done.err and "backend cpu" in done.err and "KV cache" in done.err


def test_no_ngram_comes_twice_where_that_is_asked_with_a_draft_or_without(outputs, engines):
    flags = [*TWO, "--no_repeat_ngram_size", 2]
    plain = ids(outputs(*flags, tokens=40))
    assert plain == ids(outputs(*flags, "--draft_engine_dir", engines.draft, tokens=40))
    assert plain != ids(outputs(*TWO, tokens=40))
    for tokens in plain:
        pairs = list(zip(tokens, tokens[1:], strict=False))
        assert len(pairs) == len(set(pairs))


def test_the_sample_prompt_is_used_when_none_is_given(run):
    assert run().out.startswith('Input [Text 0]: "The quick brown fox"')


@pytest.mark.parametrize(
    "flags",
    [
        ["--draft_engine_dir"],
        ["--draft-engine", "--draft-len", "2"],
        ["--draft_engine_dir", "--draft_target_model_config=[4,[0],[0],False]"],
        ["--draft_engine_dir", "--draft_target_model_config", "[3,[0],[0],True]"],
    ],
    ids=str,
)
def test_a_draft_engine_changes_no_token(outputs, engines, flags):
    flags = [flags[0], engines.draft, *flags[1:]]
    assert ids(outputs(*TWO, *flags)) == ids(outputs(*TWO))


def test_a_perfect_draft_is_accepted_and_reported(run, engines, tmp_path, llmctl):
    same = tmp_path / "same"
    checkpoint = engines.target_checkpoint
    assert llmctl("build", "--checkpoint_dir", checkpoint, "--output_dir", same).code == 0
    done = run(*TWO, "--draft-engine", same, "--json", "--end-id", -1, tokens=20)
    stats = json.loads(done.out)["stats"]
    assert stats["speculation"]["acceptance_rate"] == 1.0
    assert stats["speculation"]["tokens_per_round"] > 3
    text = run(*TWO, "--draft-engine", same).err
    assert "acceptance 1.000" in text and "draft_len 4" in text and "draft " in text


def test_ngram_drafting_changes_no_token(outputs):
    flags = ["--prompt_lookup_config", "[4,2,[0]]"]
    assert ids(outputs(*TWO, *flags, tokens=40)) == ids(outputs(*TWO, tokens=40))


def test_sampling_is_repeatable_by_seed_and_equal_with_a_draft(outputs, engines):
    flags = [*TWO, "--temperature", "2.0", "--top_p", "0.95", "--random_seed"]
    seven = ids(outputs(*flags, "7"))
    assert seven == ids(outputs(*flags, "7"))
    assert seven == ids(outputs(*flags, "7", "--draft-engine", engines.draft))
    assert seven != ids(outputs(*flags, "8"))


def test_a_temperature_alone_samples_and_zero_is_greedy(outputs):
    greedy = ids(outputs(*TWO))
    assert ids(outputs(*TWO, "--temperature", "3")) != greedy
    assert ids(outputs(*TWO, "--temperature", "0")) == greedy
    assert ids(outputs(*TWO, "--top_p", "0", "--min_p", "0")) == greedy  # run.py's "not used"
    assert ids(outputs(*TWO, "--top_k", "1", "--temperature", "3")) == greedy


def test_returned_sequences_use_consecutive_seeds(run, outputs):
    flags = ["--input-text", "x =", "--temperature", "2", "--random-seed"]
    found = outputs(*flags, "5", "--num_return_sequences", "2")
    assert [item["sequence"] for item in found] == [0, 1]
    assert ids(found) == ids(outputs(*flags, "5")) + ids(outputs(*flags, "6"))
    assert "[Text 0 Seq 1 Beam 0]" in run(*flags, "5", "--num_return_sequences", "2").out


def test_streaming_ends_with_the_text_of_a_plain_run(run):
    plain, stream = run(*TWO), run(*TWO, "--streaming", "--streaming_interval", "3")
    lines = stream.out.split("\n")
    assert sum(line.startswith("Output [Text 0 ") for line in lines) >= 3
    for row in (0, 1):
        last = [line for line in stream.out.split("Output ") if line.startswith(f"[Text {row} ")]
        assert last[-1].split("\nInput")[0].rstrip("\n") in plain.out


def test_stop_words_end_the_text_and_bad_words_never_appear(outputs, engines):
    from llmctl.cli.tokenizer import Tokenizer

    tokenizer = Tokenizer(engines.target / "tokenizer")
    plain = outputs(*TWO, "--end-id", "-1", tokens=30)
    candidates = [
        [token for token in item["token_ids"][2:] if tokenizer.decode([token]).isalpha()]
        for item in plain
    ]
    words = [tokenizer.decode([found[0]]) if found else "return" for found in candidates]
    tokens = [tokenizer.encode(word, add_special_tokens=False) for word in words]
    flags = ["--stop_words", words[0], "--stop_words", words[1]]
    for item, word, before in zip(
        outputs(*TWO, *flags, "--end-id", "-1", tokens=30), tokens, plain, strict=True
    ):
        text = before["token_ids"]
        ends = [i + len(word) for i in range(len(text)) if text[i : i + len(word)] == word]
        assert item["token_ids"] == (text[: ends[0]] if ends else text)
    banned = outputs(*TWO, "--bad_words", *words, "--end-id", "-1", tokens=30)
    for item in banned:
        for word in tokens:
            text = item["token_ids"]
            assert all(text[i : i + len(word)] != word for i in range(len(text)))


def test_the_end_id_ends_an_output_and_is_overridden_by_minus_one(outputs):
    (plain,) = outputs("--input-text", "x =", "--end-id", "-1", tokens=6)
    assert plain["finish_reason"] == "length" and len(plain["token_ids"]) == 6
    third = plain["token_ids"][2]
    (ended,) = outputs("--input-text", "x =", "--end-id", str(third), tokens=6)
    assert ended["finish_reason"] == "end_id"
    assert ended["token_ids"] == plain["token_ids"][: plain["token_ids"].index(third) + 1]


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
    assert "Output [Text 3 Beam 0]" in done.out


def test_a_limit_cut_by_the_engine_is_reported(run):
    done = run("--input-text", "x =", "--end-id", "-1", tokens=5000)
    assert done.code == 0 and "was cut to" in done.err and "max_seq_len 512" in done.err


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


def test_verify_exact_fails_at_the_first_divergence(run, engines, monkeypatch):
    from llmctl.cli.run import session

    original = session.generate

    def lying(executor, rows, listener=None):
        seconds = original(executor, rows, listener)
        if len(rows) == 2:  # the run under test; the check runs one row at a time
            rows[1].sequences[0].token_ids[3] += 1
        return seconds

    monkeypatch.setattr(session, "generate", lying)
    done = run(*TWO, "--draft-engine", engines.draft, "--verify-exact")
    assert done.code == 1
    assert "error[ExactnessViolation]: Text 1 Seq 0: output token 3" in done.err


@pytest.mark.parametrize(
    "argv, words",
    [
        (["--num_beams", "2"], "error[Unsupported]: --num-beams is 2"),
        (["--verify-exact"], "--draft-engine"),
        (["--temperature", "inf"], "temperature is inf"),
        (["--presence_penalty", "nan"], "presence_penalty is nan"),
        (["--frequency_penalty", "inf"], "frequency_penalty is inf"),
        (["--repetition_penalty", "inf"], "repetition_penalty is inf"),
        (["--end_id", "99999"], "--end-id is 99999"),
        (["--streaming_interval", "3"], "--streaming"),
        (["--stop_words", ""], "--stop-words holds an empty word"),
        (["--input_text", "a\udcff"], "is not UTF-8"),
        (["--num_threads", "100000"], "must be 1 to 1024"),
        (["--temperature", "-1"], "temperature is -1.0"),
        (["--top_p", "1.5"], "top_p is 1.5"),
        (["--input_text", "a", "--input_file", "x.txt"], "--input-file are both given"),
        (["--input_file", "absent.txt"], "does not exist"),
        (["--stop_words", "a", "--stop_words", "b"], "given 2 times for 1 prompts"),
        (["--output_csv", "/no/such/folder/x.csv"], "cannot be written"),
        (["--kv_cache_free_gpu_memory_fraction", "1.5"], "must be in (0, 1)"),
    ],
)
def test_bad_values_are_usage_errors(run, argv, words):
    done = run(*argv)
    assert done.code == 2 and words in done.err and done.out == ""


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
    (tmp_path / "config.json").write_text(json.dumps(config | {"version": 0}))
    done = run(*TWO, engine=tmp_path)
    assert done.code == 4 and "error[RebuildNeeded]" in done.err and "fix: " in done.err
