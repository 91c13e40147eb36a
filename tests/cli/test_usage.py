"""Mistakes that the parser's own messages do not name: the answer says what to type."""

from __future__ import annotations

import json

import pytest

RUN = ["run", "--engine-dir", "x", "--max-output-len", "1"]


@pytest.mark.parametrize(
    ("argv", "said", "fix"),
    [
        (
            [*RUN, "--kv_cache_enable_block_reuse", "false"],
            "--kv_cache_enable_block_reuse is a flag and takes no value; found 'false'",
            "type --no-kv-cache-enable-block-reuse, which is the form that turns it off",
        ),
        (
            [*RUN, "--enable-chunked-context=False"],
            "--enable-chunked-context is a flag and takes no value; found 'False'",
            "type --no-enable-chunked-context, which is the form that turns it off",
        ),
        (
            [*RUN, "--no-enable-chunked-context", "0"],
            "found '0'",
            "type --enable-chunked-context alone",
        ),
        (
            [*RUN, "--enable-chunked-context=5"],
            "found '5'",
            "type --enable-chunked-context alone, or --no-enable-chunked-context to turn it off",
        ),
        ([*RUN, "--streaming", "true"], "found 'true'", "type --streaming alone"),
        ([*RUN, "--streaming=5"], "found '5'", "type --streaming alone"),
        (
            ["build", "--checkpoint-dir", "x", "--gather_context_logits", "disable"],
            "found 'disable'",
            "leave --gather-context-logits out",
        ),
        (
            ["bench", "latency", "--engine-dir", "x", "--baseline", "on"],
            "found 'on'",
            "type --baseline alone",
        ),
        (["dataset", "--tokenizer", "x", "--stdout", "no", "text"], "'no'", "leave --stdout out"),
        (["--version", "true"], "--version is a flag", "type --version alone"),
    ],
)
def test_a_flag_with_a_value_is_named_with_what_to_type(llmctl, argv, said, fix):
    done = llmctl(*argv)
    assert done.code == 2 and done.err.startswith("error[Usage]: --") and said in done.err
    assert done.err.endswith(f"\nfix: {fix}\n")


@pytest.mark.parametrize(
    "argv",
    [
        ["inspect", "--json", "there", "true"],  # what follows the flag is the path
        [*RUN, "--streaming", "--chat", "words"],
        [*RUN, "--streaming", "--top-k", "true"],
    ],
)
def test_other_words_behind_a_flag_are_not_its_value(llmctl, argv):
    done = llmctl(*argv)
    assert done.code == 2 and "is a flag" not in done.out + done.err


@pytest.mark.parametrize(
    ("words", "said", "fix"),
    [
        (
            "dataset token-norm-dist --tokenizer x",
            "--tokenizer is an option of `llmctl dataset`, for all of its commands",
            "type it before token-norm-dist: llmctl dataset --tokenizer ... token-norm-dist ...",
        ),
        (
            "bench latency --engine-dir x --model y",
            "--model is an option of `llmctl bench`, for all of its commands",
            "type it before latency: llmctl bench --model ... latency ...",
        ),
        (
            "bench --engine_dir x latency",
            "--engine-dir is an option of `llmctl bench latency` and `llmctl bench throughput`",
            "type it after the command: llmctl bench latency --engine-dir ...",
        ),
        (
            "--json doctor",
            "--json is an option of `llmctl doctor`",
            "type it after doctor: llmctl doctor --json ...",
        ),
        (
            "dataset --tokenizer x",
            "a command is missing: token-norm-dist or token-unif-dist or text",
            "see: llmctl dataset --help",
        ),
        ("dataset text --temperature 1", "No such option", "see: llmctl dataset text --help"),
    ],
)
def test_an_option_on_the_wrong_side_of_a_command_is_told_its_place(llmctl, words, said, fix):
    done = llmctl(*words.split())
    if "--json" in words:
        error = json.loads(done.out)["error"]
        found = (error["name"], error["message"], error["fix"], error["exit_code"])
        assert found == ("Usage", said, fix, 2)
    else:
        assert done.code == 2 and done.err.startswith(f"error[Usage]: {said}")
        assert done.err.endswith(f"\nfix: {fix}\n")
