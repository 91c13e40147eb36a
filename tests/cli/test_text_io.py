"""Prompt files in, result files out."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from llmctl.cli.text_io import (
    Prompt,
    read_prompts,
    require_writable,
    write_csv,
    write_float_npy,
    write_jsonl,
    write_npy,
)
from llmctl.errors import BadConfig


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_txt_holds_a_prompt_a_line(tmp_path):
    path = write(tmp_path / "p.txt", 'def f(x):\r\n\n  "é"  \u2028x\n')
    assert [p.text for p in read_prompts(path)] == ["def f(x):", '  "é"  \u2028x']


def test_token_ids_survive_csv_and_npy(tmp_path):
    rows = [[3, 1, 4], [1], [5, 9]]
    write_csv(tmp_path / "x.csv", rows)
    write_npy(tmp_path / "x.npy", rows, pad_id=-1)
    wanted = [Prompt(token_ids=tuple(row)) for row in rows]
    assert read_prompts(tmp_path / "x.csv") == wanted
    assert read_prompts(tmp_path / "x.npy") == wanted
    assert np.load(tmp_path / "x.npy").dtype == np.int32


def test_jsonl_rows_carry_their_own_settings(tmp_path):
    path = tmp_path / "x.jsonl"
    rows = [
        {"prompt": "a", "max_tokens": 3, "temperature": 0.5, "stop_words": ["x"]},
        {"task_id": 1, "input_ids": [1, 2], "prompt": "lost", "output_tokens": 7},
    ]
    write_jsonl(path, rows)
    first, second = read_prompts(path)
    assert first == Prompt("a", None, {"max_tokens": 3, "temperature": 0.5, "stop_words": ["x"]})
    assert second == Prompt(None, (1, 2), {"max_tokens": 7})


@pytest.mark.parametrize(
    "line, words",
    [
        ("{", "line 2 is not JSON"),
        ("[1]", "JSON object"),
        ("{}", "neither"),
        ('{"prompt": 3}', "neither"),
        ('{"input_ids": [1, "2"]}', "list of integers"),
        ('{"input_ids": [true]}', "list of integers"),
        ('{"input_ids": [5, -4]}', "-4; token ids"),
        ('{"input_ids": [99999999999999999999]}', "token ids are 0 to"),
        ('{"prompt": "a", "tempreature": 1}', "tempreature"),
        ('{"prompt": "a", "top_k": 1.5}', "top_k"),
        ('{"prompt": "a", "max_tokens": true}', "max_tokens"),
        ('{"prompt": "a", "stop_words": [1]}', "list of strings"),
    ],
)
def test_a_bad_jsonl_row_is_named_by_file_and_line(tmp_path, line, words):
    path = write(tmp_path / "x.jsonl", '{"prompt": "a"}\n' + line + "\n")
    with pytest.raises(BadConfig, match=words) as caught:
        read_prompts(path)
    assert f"{path}, line 2" in str(caught.value)


def test_unusable_files_are_named(tmp_path):
    cases = {
        write(tmp_path / "a.csv", "1,2\n3,x\n"): "line 2",
        write(tmp_path / "b.csv", "1,-2\n"): "line 1 holds -2",
        write(tmp_path / "c.csv", "99999999999999999999\n"): "token ids are 0 to",
        write(tmp_path / "empty.npy", ""): "plain .npy",
        write(tmp_path / "a.md", "hello"): ".jsonl",
        write(tmp_path / "empty.txt", "\n"): "no prompts",
        tmp_path / "absent.txt": "does not exist",
    }
    (tmp_path / "latin.txt").write_bytes(b"\xe9t\xe9")
    cases[tmp_path / "latin.txt"] = "UTF-8"
    np.save(tmp_path / "float.npy", np.zeros((2, 2)))
    cases[tmp_path / "float.npy"] = "float64"
    np.save(tmp_path / "object.npy", np.array([[1], [2, 3]], dtype=object), allow_pickle=True)
    cases[tmp_path / "object.npy"] = "plain .npy"  # objects are pickles: never loaded
    for path, words in cases.items():
        with pytest.raises(BadConfig, match=words.replace(".", r"\.")):
            read_prompts(path)


def test_a_failed_write_leaves_the_old_file_and_nothing_beside_it(tmp_path):
    path = write(tmp_path / "out.jsonl", "old\n")
    with pytest.raises(ValueError):
        write_jsonl(path, [{"a": 1}, {"a": float("nan")}])
    assert path.read_text() == "old\n" and list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
def test_a_disk_that_fills_at_the_last_flush_leaves_nothing(tmp_path, monkeypatch):
    def opened(handle, *arguments, **options):
        os.close(handle)
        return open("/dev/full", *arguments, **options)

    monkeypatch.setattr(os, "fdopen", opened)
    with pytest.raises(OSError, match="No space left"):
        write_jsonl(tmp_path / "x.jsonl", [{"a": 1}])
    assert list(tmp_path.iterdir()) == []


def test_log_probs_are_padded_with_nan(tmp_path):
    write_float_npy(tmp_path / "x.npy", [[-0.5, -1.0], [], [-2.0]])
    array = np.load(tmp_path / "x.npy")
    assert array.dtype == np.float32 and array.shape == (3, 2)
    assert np.isnan(array).tolist() == [[False, False], [True, True], [False, True]]


def test_an_output_path_without_a_folder_is_refused_before_anything_runs(tmp_path):
    require_writable(tmp_path / "x.csv")
    for path in (tmp_path / "none" / "x.csv", tmp_path):
        with pytest.raises(BadConfig, match="cannot be written"):
            require_writable(path)


def test_results_are_read_back_as_json(tmp_path):
    write_jsonl(tmp_path / "x.jsonl", [{"text": "é\n"}])
    assert json.loads((tmp_path / "x.jsonl").read_text(encoding="utf-8")) == {"text": "é\n"}


def test_links_devices_and_pipes_stay_what_they_are(tmp_path):
    real, link = tmp_path / "real.csv", tmp_path / "link.csv"
    real.write_text("old")
    link.symlink_to(real)
    write_csv(link, [[1, 2]])
    assert link.is_symlink() and real.read_text() == "1,2\n"

    pipe = tmp_path / "pipe.npy"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    require_writable(pipe, Path(os.devnull), Path(os.devnull))
    write_npy(pipe, [[1, 2], [3]], pad_id=-1)
    content = os.read(reader, 1000)
    os.close(reader)
    (tmp_path / "read.npy").write_bytes(content)
    assert np.load(tmp_path / "read.npy").tolist() == [[1, 2], [3, -1]]
    assert pipe.is_fifo()

    write_jsonl(Path(os.devnull), [{"a": 1}])
    assert Path(os.devnull).is_char_device()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "link.csv",
        "pipe.npy",
        "read.npy",
        "real.csv",
    ]


def test_two_outputs_have_two_files_with_names_that_fit(tmp_path):
    link = tmp_path / "link.csv"
    link.symlink_to(tmp_path / "x.csv")
    with pytest.raises(BadConfig, match="two outputs"):
        require_writable(tmp_path / "x.csv", link)
    with pytest.raises(BadConfig, match="its name has over"):
        require_writable(tmp_path / ("x" * 250))
    require_writable(tmp_path / "x.csv", tmp_path / "y.csv")
