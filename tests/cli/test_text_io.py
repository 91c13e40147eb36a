"""Prompt files in, result files out."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from support.run import write_results

from llmctl.cli.run.text_io import Prompt, read_prompts
from llmctl.errors import BadConfig


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_txt_holds_a_prompt_a_line(tmp_path):
    path = write(tmp_path / "p.txt", 'def f(x):\r\n\n  "é"  \u2028x\n')
    assert [p.text for p in read_prompts(path)] == ["def f(x):", '  "é"  \u2028x']


def test_rows_of_npy_are_padded_on_either_side(tmp_path):
    np.save(tmp_path / "x.npy", np.array([[-1, 5, 0, 6], [5, -1, -3, -1], [-1] * 4]))
    found = [prompt.token_ids for prompt in read_prompts(tmp_path / "x.npy")]
    assert found == [(5, 0, 6), (5,), ()]


def test_token_ids_survive_csv_and_npy(tmp_path):
    rows = [[3, 1, 4], [1], [5, 9]]
    write_results(rows, csv=tmp_path / "x.csv", npy=tmp_path / "x.npy")
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
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
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
        ('{"text": "a", "top_k": 1}', r'neither .* "input_ids"; its keys are .*text.*top_k'),
        ('{"prompt": "a", "text": "b"}', "'text'; known are: prompt, input_ids, max_tokens"),
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
    assert ("jq -c" in caught.value.fix) == (line in ("{", "[1]"))


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
    np.save(tmp_path / "gap.npy", np.array([[-1, 5, 6, -1, -1], [-1, 5, -2, -1, 7]]))
    cases[tmp_path / "gap.npy"] = "row 1 holds -2 between its token ids, at index 2"
    np.save(tmp_path / "object.npy", np.array([[1], [2, 3]], dtype=object), allow_pickle=True)
    cases[tmp_path / "object.npy"] = "plain .npy"  # objects are pickles: never loaded
    for path, words in cases.items():
        with pytest.raises(BadConfig, match=words.replace(".", r"\.")):
            read_prompts(path)


def test_log_probs_are_padded_with_nan(tmp_path):
    write_results([[-0.5, -1.0], [], [-2.0]], log_probs_npy=tmp_path / "x.npy")
    array = np.load(tmp_path / "x.npy")
    assert array.dtype == np.float32 and array.shape == (3, 2)
    assert np.isnan(array).tolist() == [[False, False], [True, True], [False, True]]
