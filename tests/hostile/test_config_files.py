"""`--config` files of strangers: YAML's tags, aliases and guesses at what a word means."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.hostile import attempt, bounded, run, write

from llmctl.cli.config_file import read_config
from llmctl.errors import BadConfig

BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "\n".join(
    f"{name}: &{name} [{', '.join(['*' + before] * 10)}]"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (BOMB, "more than 20000 values"),
        ("input-text: &a [*a]", "Circular"),
        ("input-text: [" + "&a [x, x, x, x], " + "*a, " * 10_000 + "]", "more than 20000 values"),
        ("input-text: !!python/object/apply:os.system ['true']", "python/object/apply:os.system"),
        ("input-text: !!binary aGk=", "is not read"),
        ("input-text: !own x", "the tag '!own' is not read"),
        ("<<: {json: true}", "2002:merge' is not read"),
        ("json: true\njson: false", "'json' is there twice"),
        ("{json: true, input-text: {a: b}}", "one value is wanted"),
        ("? [a, b]\n: c", "is not an option"),
        ("input-text: " + "[" * 5000, "is not YAML of options"),
        ("a\n--- \nb", "is not YAML of options"),
        ("max-output-len: " + "9" * 5000, "4300"),
        ("max-output-len: .nan", "Invalid value for '--max-output-len'"),
        ("temperature: 1e999", "temperature is inf"),
        ("max-output-len: 0x10", "Invalid value for '--max-output-len'"),
        ("input-text: 2024-13-45", "month must be in 1..12"),
        ("json: 1", "must be true or false"),
        ("x", "holds a YAML value"),
        (b"\xff\xfe\x00", "is not YAML of options"),
        ("x: " + "y" * 300_000, "at most 262144 are read"),
    ],
)  # fmt: skip
def test_a_file_of_no_options_is_refused(
    sound: Any, tmp_path: Path, text: str | bytes, words: str
) -> None:
    write(tmp_path / "x.yaml", text)
    outcome = attempt("run", "--engine-dir", sound.engine, "--config", tmp_path / "x.yaml",
                      *(() if b"max-output" in (tmp_path / "x.yaml").read_bytes() else
                        ("--max-output-len", 2)))  # fmt: skip
    assert outcome.code == 2 and outcome.seconds < 30, outcome
    assert words in outcome.message and len(outcome.message) < 1500


@pytest.mark.parametrize(
    "word", ["010", "1.10", "no", "12:30", "2024-01-01", "1_000", "~x", "0x1F"]
)
def test_a_word_is_what_it_would_be_on_the_command_line(
    sound: Any, tmp_path: Path, word: str
) -> None:
    """YAML takes them for the numbers 8, 1.1, 750, 1000 and 31, false, and a date."""
    write(tmp_path / "x.yaml", f"input-text: [{word}]\n")
    of_file = run(sound.engine, "--config", tmp_path / "x.yaml")
    of_line = run(sound.engine, "--input-text", word)
    assert of_file.code == of_line.code == 0
    prompt = f'"prompt": "{word}"'
    assert prompt in of_file.out and prompt in of_line.out


@settings(max_examples=150)
@given(text=st.text(st.sampled_from("ab:-[]{}&*!?|>#'\"\n ,%@01"), max_size=40))
def test_any_text_is_options_or_refused(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    write(path, text)

    param = SimpleNamespace(name="ab", opts=["--ab"], param_type_name="option")
    with bounded():
        try:
            found = read_config(path, SimpleNamespace(name="any", params=[param]))
        except BadConfig as error:
            assert str(path) in str(error)
        else:
            assert found == {} or isinstance(found["ab"], str)
