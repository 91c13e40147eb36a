"""Prompts and data sets of strangers: .npy, .csv, .jsonl, .txt and the command line."""

from __future__ import annotations

import json
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.hostile import attempt, bounded, require_named, run, write
from support.mutations import Mutation, mutations

from llmctl.cli.run.text_io import read_prompts
from llmctl.errors import BadCalibrationData, BadConfig
from llmctl.quantize import calibration


def npy(header: str, values: bytes = b"", length: int | None = None, version: int = 1) -> bytes:
    """A .npy file, which may lie about the length of its header."""
    form = "<H" if version == 1 else "<I"
    size = len(header) if length is None else length
    return b"\x93NUMPY" + bytes([version, 0]) + struct.pack(form, size) + header.encode() + values


def described(dtype: str, shape: str, order: str = "False") -> str:
    """A .npy header."""
    return f"{{'descr': {dtype!r}, 'fortran_order': {order}, 'shape': {shape}, }}\n"


ONE = (1).to_bytes(8, "little")
ARRAYS = {
    "a terabyte": (npy(described("<i8", "(10**12,)")), "malformed"),
    "8 terabytes": (npy(described("<i8", "(1000000000000,)")), "8000000000000 bytes of values"),
    "4 gigabytes": (npy(described("<i8", "(500000000,)")), "and 0 are there"),
    "rows of nothing": (npy(described("<i8", "(1000000000, 0)")), "holds no prompts"),
    "no rows": (npy(described("<i8", "(0, 1000000000)")), "holds no prompts"),
    "a wrapped size": (npy(described("<i8", "(4294967296, 4294967296)")), "bytes of values"),
    "beyond 64 bits": (npy(described("<i8", "(18446744073709551617,)"), ONE), "its shape is"),
    "negative": (npy(described("<i8", "(-1,)"), ONE * 2), "its shape is (-1,)"),
    "a bool for a size": (npy(described("<i4", "(True, 2)"), ONE), "its shape is (True, 2)"),
    "70 dimensions": (npy(described("<i8", "(" + "1," * 70 + ")"), ONE), "it has shape (1, 1,"),
    "no dimension": (npy(described("<i8", "()"), ONE), "it has shape ()"),
    "objects": (npy(described("|O", "(1,)"), b"\x80\x04N."), "dtype object"),
    "a pickle": (b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00\x8c\x07hostile.", "it begins with"),
    "an archive": (b"PK\x03\x04" + bytes(100), "is an archive of arrays"),
    "text": (npy(described("<U8", "(1,)"), bytes(32)), "dtype <U8"),
    "durations": (npy(described("<m8[s]", "(1,)"), ONE), "dtype timedelta64[s]"),
    "fractions": (npy(described("<f8", "(1,)"), ONE), "dtype float64"),
    "truths": (npy(described("|b1", "(8,)"), ONE), "dtype bool"),
    "open brackets": (npy("(" * 9000), "is not a plain .npy array"),
    "open quotes": (npy("{'descr': '''"), "is not a plain .npy array"),
    "signs": (npy("-" * 9000 + "1"), "is not a plain .npy array"),
    "code": (npy("{'descr': __import__('os').system('true')}"), "malformed"),
    "a long header": (npy(described("<i8", "(1,)") + " " * 60_000, ONE), "at most 10000 are read"),
    "a header of 4 GB": (npy("{", b"", 2**32 - 1, version=2), "at most 10000 are read"),
    "version 9": (b"\x93NUMPY\x09\x00" + bytes(100), "version 1.0 or 2.0 is read"),
    "more than it tells": (npy(described("<i8", "(1,)"), ONE * 3), "8 bytes of values, and 24"),
    "less than it tells": (npy(described("<i8", "(2,)"), ONE), "16 bytes of values, and 8"),
    "beyond ids": (npy(described("<u8", "(1,)"), b"\xff" * 8), "holds 18446744073709551615"),
    "nothing": (b"", "it begins with b''"),
    "its name alone": (b"\x93NUMPY", "is not a plain .npy array"),
}


@pytest.mark.parametrize("case", ARRAYS)
def test_an_array_that_is_none_of_token_ids_is_refused(
    sound: Any, tmp_path: Path, case: str
) -> None:
    content, words = ARRAYS[case]
    write(tmp_path / "x.npy", content)
    outcome = run(sound.engine, "--input-file", tmp_path / "x.npy")
    require_named(outcome, "BadConfig")
    assert words in outcome.message and outcome.code == 2


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", ["<i4", ">i4", "<u2", "<i8", "|i1"])
def test_arrays_of_every_integer_are_read_as_numpy_reads_them(
    tmp_path: Path, dtype: str, order: Any
) -> None:
    array = np.arange(1, 7).reshape(2, 3).astype(dtype, order=order)
    np.save(tmp_path / "x.npy", array)
    rows = [prompt.token_ids for prompt in read_prompts(tmp_path / "x.npy")]
    assert rows == [(1, 2, 3), (4, 5, 6)]


TEXTS: list[tuple[str, str | bytes, str]] = [
    ("x.csv", "1_0,2", "holds '1_0'; token ids are wanted"),
    ("x.csv", "\u0663,\u0664", "token ids are wanted"),
    ("x.csv", "9" * 5000, "holds '999"),
    ("x.csv", "9" * 15, "holds 999999999999999"),
    ("x.csv", "1,\0", "token ids are wanted"),
    ("x.csv", "1.0", "holds '1.0'"),
    ("x.csv", '"1,2\n3', "token ids are wanted"),
    ("x.csv", "1" * 200_000, "field larger than field limit"),
    ("x.csv", b"\xff\xfe1", "not UTF-8 text"),
    ("x.csv", " , ,\n", "holds no prompts"),
    ("x.csv", "1,5000", "the engine's ids are 0 to 259"),
    ("x.jsonl", '{"prompt": "a", "prompt": "b"}', "the key 'prompt' occurs twice"),
    ("x.jsonl", '{"prompt": "a", "temperature": NaN}', "NaN is not JSON"),
    ("x.jsonl", '{"prompt": "a", "temperature": 1e999}', "does not fit a double"),
    ("x.jsonl", '{"prompt": "a", "seed": ' + "9" * 5000 + "}", "4300"),
    ("x.jsonl", '{"prompt": ' + "[" * 100_000, "nested too deeply"),
    ("x.jsonl", '{"prompt": "\\ud800"}', "half of a surrogate pair"),
    ("x.jsonl", '{"prompt": "a", "stop_words": ["\\udfff"]}', "half of a surrogate pair"),
    ("x.jsonl", '{"prompt": 3, "input_ids": [1]}', '"prompt" is 3, not text'),
    ("x.jsonl", '{"input_ids": [true]}', "must be a list of integers"),
    ("x.jsonl", '{"input_ids": [-1]}', "holds -1"),
    ("x.jsonl", '{"input_ids": []}', "input_token_ids is empty"),
    ("x.jsonl", '{"prompt": ""}', "input_token_ids is empty"),
    ("x.jsonl", '{"prompt": "a", "max_tokens": -1}', "max_tokens is -1"),
    ("x.jsonl", '{"prompt": "a", "max_tokens": 18446744073709551616}', "beyond 64 bits"),
    ("x.jsonl", '{"prompt": "a", "' + "k" * 5000 + '": 1}', "has the key 'kkk"),
    ("x.jsonl", b'{"prompt": "\xff"}', "not UTF-8 text"),
    ("x.txt", b"\xed\xa0\x80", "not UTF-8 text"),
    ("x.txt", "\n \n", "holds no prompts"),
    ("x.pkl", "", "its name must end in one of"),
]


@pytest.mark.parametrize(("name", "content", "words"), TEXTS)
def test_rows_that_are_no_prompts_are_refused(
    sound: Any, tmp_path: Path, name: str, content: str | bytes, words: str
) -> None:
    write(tmp_path / name, content)
    outcome = run(sound.engine, "--input-file", tmp_path / name)
    require_named(outcome, "BadConfig")
    assert words in outcome.message


ROW = {
    "prompt": "a",
    "input_ids": [5, 6],
    "max_tokens": 2,
    "temperature": 0.5,
    "top_k": 3,
    "top_p": 0.9,
    "min_p": 0.1,
    "seed": 7,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "no_repeat_ngram_size": 2,
    "min_tokens": 1,
    "stop_words": ["x", "yz"],
    "bad_words": ["q"],
    "priority": 0.5,
}


@settings(max_examples=80)
@given(mutation=mutations(ROW))
def test_a_mutated_row_is_refused_or_runs(
    sound: Any, tmp_path_factory: pytest.TempPathFactory, mutation: Mutation
) -> None:
    path = tmp_path_factory.getbasetemp() / "row.jsonl"
    write(path, mutation.apply(ROW))
    outcome = run(sound.engine, "--input-file", path)
    if outcome.code:
        require_named(outcome)
    else:
        assert not mutation.is_retyped, mutation


@settings(max_examples=120)
@given(data=st.data())
def test_flipped_and_cut_arrays_are_refused_or_read_as_integers(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.getbasetemp() / "flipped.npy"
    whole = npy(described("<i4", "(2, 3)") + " " * 20, np.arange(6, dtype="<i4").tobytes())
    place = data.draw(st.integers(0, len(whole) - 1))
    flip = bytes([whole[place] ^ data.draw(st.integers(1, 255))])
    write(
        path, data.draw(st.sampled_from([whole[:place], whole[:place] + flip + whole[place + 1 :]]))
    )
    with bounded():
        try:
            prompts = read_prompts(path)
        except BadConfig:
            return
    assert all(0 <= item < 2**31 for prompt in prompts for item in prompt.token_ids or ())


MILLION = 1_000_000


@pytest.mark.parametrize("text", ["x" * MILLION, "\U0001f642" * (MILLION // 4)])
def test_a_prompt_of_a_million_characters_is_refused_for_its_length(
    sound: Any, tmp_path: Path, text: str
) -> None:
    write(tmp_path / "x.jsonl", {"prompt": text})
    outcome = run(sound.engine, "--input-file", tmp_path / "x.jsonl")
    require_named(outcome, "PromptTooLong")
    assert "1000000 tokens; max_seq_len 128" in outcome.message
    short = run(sound.engine, "--input-file", tmp_path / "x.jsonl", "--max-input-length", 100)
    assert short.code == 0, "its last tokens alone"


@pytest.mark.parametrize("chat", [(), ("--chat",)])
def test_surrogates_and_empty_prompts_on_the_command_line(sound: Any, chat: tuple[str]) -> None:
    half = run(sound.engine, "--input-text", "a\ud800", *chat)
    require_named(half, "BadConfig")
    assert "is not UTF-8 text" in half.message
    empty = run(sound.engine, "--input-text", "", *chat)
    if chat:  # the template makes a prompt of it
        assert empty.code == 0
    else:
        require_named(empty, "BadConfig")
        assert "input_token_ids is empty" in empty.message


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[" * 100_000, "nested too deeply"),
        ('{"text": "a", "text": "b"}', "occurs twice"),
        ('{"text": "\\ud800"}', "half of a surrogate pair"),
        ('{"text": 5}', "no string 'text'"),
        ('{"' + "k" * 5000 + '": "a"}', "no string 'text'; its keys are kkk"),
        ("[]", "a JSON object is wanted"),
    ],
)
def test_a_data_set_of_odd_rows_is_refused(
    sound: Any, tmp_path: Path, content: str, words: str
) -> None:
    write(tmp_path / "x.jsonl", content)
    outcome = attempt("dataset", "--tokenizer", sound.checkpoint, "text", "--input-file",
                      tmp_path / "x.jsonl", "--output-len-dist", "2,0")  # fmt: skip
    assert outcome.code == 2 and "error[BadConfig]" in outcome.message
    assert words in outcome.message and len(outcome.message) < 1000


def test_a_file_of_many_rows_is_read_in_the_time_its_size_takes(tmp_path: Path) -> None:
    write(tmp_path / "x.jsonl", "\n".join([json.dumps({"prompt": "a"})] * 20_000))
    start = time.monotonic()
    assert len(read_prompts(tmp_path / "x.jsonl")) == 20_000
    assert time.monotonic() - start < 30


def test_a_compressed_calibration_file_is_read_up_to_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4 GB of text in a kilobyte."""
    column = pyarrow.DictionaryArray.from_arrays(
        pyarrow.array([0] * 40_000, pyarrow.int32()), pyarrow.array(["y" * 100_000])
    )
    path = tmp_path / "x.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), path, compression="zstd")
    assert path.stat().st_size < 4096
    monkeypatch.setattr(calibration, "_MOST_CHARS", 1 << 28)
    with bounded(), pytest.raises(BadCalibrationData, match="more than 268435456 characters"):
        calibration.READERS[".parquet"](path)


def test_two_calibration_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    columns = [pyarrow.array(["a"]), pyarrow.array(["b"])]
    pyarrow.parquet.write_table(pyarrow.table(columns, names=["text", "text"]), path)
    with pytest.raises(BadCalibrationData, match="2 columns named text"):
        calibration.READERS[".parquet"](path)
