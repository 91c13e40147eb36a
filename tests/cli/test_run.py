"""`llmctl run`: text, drafts, sampling, stops, on real engines of random weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from support.run import TWO, ids


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
    neutral = ["--temperature", "0", "--top_k", "1", "--top_p", "1.0", "--min_p", "0"]
    assert ids(outputs(*TWO, *neutral)) == greedy


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


def test_all_end_ids_of_the_model_end_outputs_alike(run, outputs, engines, tmp_path: Path):
    (plain,) = outputs("--input-text", "x =", "--end-id", "-1", tokens=6)
    third = plain["token_ids"][2]
    folder = shutil.copytree(engines.target, tmp_path / "engine")
    config = json.loads((folder / "config.json").read_text())
    config["pretrained_config"]["eos_token_id"] = [1, third]
    (folder / "config.json").write_text(json.dumps(config))
    row = {"prompt": "x =", "min_tokens": 4}
    (tmp_path / "x.jsonl").write_text(json.dumps({"prompt": "x ="}) + "\n" + json.dumps(row))
    done = run("--input-file", tmp_path / "x.jsonl", "--json", engine=folder, tokens=6)
    ended, later = json.loads(done.out)["outputs"]
    assert ended["finish_reason"] == "end_id"
    assert ended["token_ids"] == plain["token_ids"][: plain["token_ids"].index(third) + 1]
    assert len(later["token_ids"]) >= 4 and third not in later["token_ids"][:3]
