"""Builds, limits and damaged engines that are refused by name."""

from __future__ import annotations

import json
import shutil

import pytest
from support.refusals import RUN, refused

from llmctl.errors import OutOfDisk


def test_a_place_that_cannot_be_written_is_refused_before_any_work(
    llmctl, engines, tmp_path, monkeypatch
):
    def no_work(*_, **__):
        raise AssertionError("planned before")

    monkeypatch.setattr("llmctl.builder.build.plan_build", no_work)
    build = ("build", "--checkpoint-dir", engines.target_checkpoint, "--output-dir")
    taken = llmctl(*build, engines.draft)
    assert refused(taken, "OutputExists", str(engines.draft)) and taken.code == 1
    file = tmp_path / "file"
    file.write_text("")
    for place in (file / "engine", tmp_path / ("x" * 250)):
        done = llmctl(*build, place)
        assert done.code == 2 and refused(done, "BadConfig", str(place), "fix: ")
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(
    ("group", "name"),
    [("pretrained_config", "vocab_size"), ("build_config", "max_seq_len")]
    + [("build_config", "max_batch_size")],
)
def test_numbers_of_an_engine_that_are_missing_or_none_are_named(
    llmctl, engines, tmp_path, group, name
):
    copy = tmp_path / "engine"
    shutil.copytree(engines.target, copy)
    path = copy / "config.json"
    config = json.loads(path.read_text())
    for value in (None, "8", True, 8.5):
        config[group][name] = value
        path.write_text(json.dumps(config))
        for command in (("inspect", copy), (*RUN, "--engine-dir", copy, "--input-text", "a")):
            done = llmctl(*command)
            assert refused(done, "CorruptEngine", f"{group}.{name}", "fix: "), done.err


def test_a_build_config_that_is_no_json_is_a_bad_option(llmctl, engines, tmp_path):
    path = tmp_path / "build.json"
    path.write_text('{"max_batch_size": 3,}')
    build = ("build", "--checkpoint-dir", engines.target_checkpoint, "--dry-run")
    done = llmctl(*build, "--build-config", path)
    assert done.code == 2 and refused(done, "BadConfig", "--build-config", str(path))


@pytest.mark.parametrize(
    ("key", "name", "words"),
    [
        ("plugin_config", "BadConfig", "plugins are options of the command line"),
        ("gemm_plugin", "BadConfig", "plugins are options of the command line"),
        ("weight_streaming", "Unsupported", "'weight_streaming' is not available: weights are"),
        ("max_batch", "BadConfig", "fix: the nearest is max_batch_size"),
        ("xyz", "BadConfig", "fix: there are dtype, max_batch_size, "),
    ],
)
def test_what_a_build_config_cannot_hold_has_its_reason(
    llmctl, engines, tmp_path, key, name, words
):
    path = tmp_path / "build.json"
    path.write_text(json.dumps({key: True}))
    build = ("build", "--checkpoint-dir", engines.target_checkpoint, "--dry-run")
    done = llmctl(*build, "--build-config", path)
    assert done.code == 2 and refused(done, name, f"{path}: {key!r}", words)


@pytest.mark.parametrize("limit", ["batch-size", "seq-len", "num-tokens", "draft-len"])
def test_limits_beyond_32_bits_are_refused(llmctl, engines, limit):
    build = ("build", "--checkpoint-dir", engines.target_checkpoint, "--dry-run")
    done = llmctl(*build, f"--max-{limit}", 10**12)
    name = f"max_{limit.replace('-', '_')}"
    assert done.code == 2 and refused(done, "BadConfig", name, "2147483647"), done.err


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_limits_whose_product_is_beyond_32_bits_are_refused(llmctl, engines, backend):
    build = ("build", "--checkpoint-dir", engines.target_checkpoint, "--dry-run")
    limits = ("--max-batch-size", 2**20, "--max-draft-len", 2**12)
    done = llmctl(*build, *limits, "--backend", backend)
    assert done.code == 2 and refused(done, "BadConfig", "max_batch_size * (max_draft_len + 1)")


def test_a_build_that_fails_leaves_no_network(llmctl, engines, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OutOfDisk("no room")

    build = ("build", "--checkpoint-dir", engines.target_checkpoint, "--output-dir", tmp_path / "e")
    monkeypatch.setattr("llmctl.builder.build.run_build", full)
    assert llmctl(*build, "--visualize-network", tmp_path / "network").code == 3
    assert list(tmp_path.iterdir()) == []
    done = llmctl(*build, "--visualize-network", tmp_path / "nowhere" / "network")
    assert done.code == 2 and refused(done, "BadConfig", "nowhere")
    done = llmctl(*build, "--visualize-network", tmp_path / "e")
    assert done.code == 2 and refused(done, "BadConfig", "--visualize-network", "--output-dir")
    (tmp_path / "e").symlink_to(tmp_path / "gone")
    done = llmctl(*build)
    assert done.code == 1 and refused(done, "OutputExists", "fix: ")


def test_options_that_would_have_no_effect_on_prompts_are_refused(llmctl, engines, tmp_path):
    rows = tmp_path / "rows.jsonl"
    run = (*RUN, "--engine-dir", engines.target, "--input-file", rows)
    rows.write_text('{"input_ids": [5, 6]}\n')
    done = llmctl(*run, "--chat")
    assert done.code == 2 and refused(done, "BadConfig", "--chat", "token ids", "fix: ")
    rows.write_text('{"prompt": "a b"}\n')
    done = llmctl(*run, "--chat", "--no-add-special-tokens")
    assert done.code == 2 and refused(done, "BadConfig", "--no-add-special-tokens", "fix: ")
    policy = ("--context-chunking-policy", "equal-progress")
    assert llmctl(*run, *policy).code == 0
    done = llmctl(*run, *policy, "--no-enable-chunked-context")
    assert done.code == 2 and refused(done, "BadConfig", "--context-chunking-policy", "fix: ")
    rows.write_text('{"prompt": "a b", "max_tokens": 3, "output_tokens": 4}\n')
    done = llmctl(*run)
    assert done.code == 2 and refused(done, "BadConfig", "line 1", "max_tokens", "output_tokens")


def test_a_sweep_of_ngrams_longer_than_the_engine_verifies_is_refused_before_loading(
    llmctl, engines, monkeypatch
):
    def no_work(*_, **__):
        raise AssertionError("opened before")

    monkeypatch.setattr("llmctl.cli.bench.session.OpenEngines", no_work)
    words = ("--engine-dir", engines.target, "--ngram-config", "[2, 3, [0]]")
    done = llmctl("bench", "latency", *words, "--sweep-draft-len", "1,40")
    assert refused(done, "PairMismatch", "40"), done.err


def test_a_bad_option_without_a_fix_of_its_own_points_at_the_help_of_its_command(llmctl, engines):
    words = ("--engine-dir", engines.target, "--request-rate", -1)
    done = llmctl("bench", "throughput", *words)
    assert done.code == 2 and done.err.endswith("\nfix: see: llmctl bench throughput --help\n")
    done = llmctl(*RUN, "--engine-dir", engines.target, "--input-file", "prompts.doc")
    assert done.code == 2 and done.err.endswith("\nfix: see: llmctl run --help\n")


@pytest.mark.parametrize(
    ("part", "field", "value"),
    [
        ("tokenizer", "hash", 3),
        ("tokenizer", "hash", ...),
        ("build_config", "max_num_tokens", None),
    ],
)
def test_an_engine_whose_config_lacks_what_is_read_is_named(
    llmctl, engines, tmp_path, part, field, value
):
    copy = tmp_path / "engine"
    shutil.copytree(engines.target, copy)
    config = json.loads((copy / "config.json").read_text())
    if value is ...:
        del config[part][field]
    else:
        config[part][field] = value
    (copy / "config.json").write_text(json.dumps(config))
    for words in ((*RUN, "--input-text", "a b", "--engine-dir"), ("inspect",)):
        assert refused(llmctl(*words, copy), "CorruptEngine", field, "fix: ")


def test_what_is_read_is_not_replaced(llmctl, engines, tmp_path):
    rows = tmp_path / "rows.jsonl"
    text = '{"prompt": "a b", "output_tokens": 2}\n'
    rows.write_text(text)
    engine = ("--engine-dir", engines.target)
    for words in (
        (*RUN, *engine, "--input-file", rows, "--output-jsonl", rows),
        ("bench", "latency", *engine, "--dataset", rows, "--raw", rows),
    ):
        done = llmctl(*words)
        assert done.code == 2 and refused(done, "BadConfig", "is read") and rows.read_text() == text


def test_odd_rows_and_values_are_named(llmctl, engines, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(f'{{"prompt": "a", "temperature": 1{"0" * 400}}}\n')
    done = llmctl(*RUN, "--engine-dir", engines.target, "--input-file", rows)
    assert done.code == 2 and refused(done, "BadConfig", "line 1", "temperature", "64 bits")
    done = llmctl(*RUN, "--engine-dir", engines.target, "--input-file", tmp_path / "x.txt")
    assert refused(done, "BadConfig", "does not exist")
    (tmp_path / "x.txt").mkdir()
    done = llmctl(*RUN, "--engine-dir", engines.target, "--input-file", tmp_path / "x.txt")
    assert refused(done, "BadConfig", "is a folder")
    sweep = ("--draft-engine", engines.draft, "--sweep-draft-len", "")
    done = llmctl("bench", "latency", "--engine-dir", engines.target, *sweep)
    assert done.code == 2 and refused(done, "BadConfig", "--sweep-draft-len")
    done = llmctl("dataset", "--tokenizer", engines.target, "--output", "/nope/x", "text")
    assert done.err.endswith("fix: see: llmctl dataset text --help\n"), done.err
    done = llmctl("inspect", engines.target, "--graph", "/nope/x.html")
    assert done.code == 2 and refused(done, "BadConfig", "/nope")


@pytest.mark.parametrize(
    "name, text", [("x.txt", "a b\n"), ("x.csv", "5,6\n"), ("x.jsonl", '{"prompt": "a b"}\n')]
)
def test_a_byte_order_mark_is_no_part_of_a_prompt(llmctl, engines, tmp_path, name, text):
    path, found = tmp_path / name, []
    for encoding in ("utf-8", "utf-8-sig"):
        path.write_text(text, encoding=encoding)
        found.append(llmctl(*RUN, "--engine-dir", engines.target, "--input-file", path).out)
    assert found[0] == found[1] != ""
    path.write_text(text, encoding="utf-16")
    done = llmctl(*RUN, "--engine-dir", engines.target, "--input-file", path)
    assert done.code == 2 and refused(done, "BadConfig", "is UTF-16 and not", "iconv -f UTF-16")
