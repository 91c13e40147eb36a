"""List options are rewritten, values are left as they are."""

from __future__ import annotations

import json

import pytest

from llmctl.cli.argv import expand_lists
from llmctl.cli.run.command import prepare_argv
from llmctl.errors import BadConfig


@pytest.mark.parametrize(
    "argv, wanted",
    [
        (["--input_text", "a", "b"], ["--input-text=a", "--input-text=b"]),
        (["--input-text", "a", "--input_text=b"], ["--input-text=a", "--input-text=b"]),
        (
            ["--input-text", "a_b", "-c", "--top_k", "1"],
            ["--input-text=a_b", "--input-text=-c", "--top_k", "1"],
        ),
        (["--input-text=--x_y"], ["--input-text=--x_y"]),
        (["--input-text", "k=v"], ["--input-text=k=v"]),
        (["--input-text="], ["--input-text="]),
        (["--", "--input_text", "a"], ["--", "--input_text", "a"]),
        (["--engine_dir", "a_b"], ["--engine_dir", "a_b"]),
    ],
)
def test_a_list_becomes_repeated_options(argv, wanted):
    assert expand_lists(argv, repeated=("--input-text",)) == wanted


@pytest.mark.parametrize("name", ["--input_text", "--stop-words"])
def test_a_list_without_values_never_takes_the_next_option_for_one(name):
    for argv, said in (([name, "--json"], "value, as --json is read as an option"), ([name], "")):
        with pytest.raises(BadConfig, match=f"without a {said or 'value$'}") as caught:
            prepare_argv(argv)
        assert f"{name.replace('_', '-')}=VALUE" in caught.value.fix


def test_each_occurrence_of_a_word_list_stays_together():
    found = prepare_argv(["--stop_words", "a", 'b"', "--stop-words=c", "--bad_words", "d"])
    assert [word.split("=", 1)[0] for word in found] == [
        "--stop-words",
        "--stop-words",
        "--bad-words",
    ]
    assert [json.loads(word.split("=", 1)[1]) for word in found] == [["a", 'b"'], ["c"], ["d"]]


def test_underscores_and_hyphens_name_the_same_option(llmctl, tmp_path):
    for words in (
        ["--engine_dir", tmp_path / "a_b", "--max_output_len=3"],
        ["--engine-dir", tmp_path / "a_b", "--max-output-len", "3"],
        [f"--engine_dir={tmp_path / 'a_b'}", "--max_output-len", "3"],
    ):
        done = llmctl("run", *words)
        assert done.code == 1 and done.err.startswith("error[EngineNotFound]")
        assert str(tmp_path / "a_b") in done.err  # the value keeps its underscore
