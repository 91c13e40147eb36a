"""`llmctl dataset`: rows for the benchmark, from distributions and from text."""

from __future__ import annotations

import json
import shlex
import subprocess
import weakref
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from llmctl.cli.dataset.lengths import NormalLengths, UniformLengths
from llmctl.cli.dataset.rows import DatasetRow, open_tokenizer, summary, write_rows
from llmctl.errors import BadConfig, TokenizerError

NORMAL = "token-norm-dist --input-mean 20 --input-stdev 4 --output-mean 9 --output-stdev 2"
UNIFORM = "token-unif-dist --input-min 3 --input-max 6 --output-min 1 --output-max 2"
# What follows the program's name in NVIDIA's article on Llama 3.3 70B.
ARTICLE = (
    "--stdout token-norm-dist --num-requests 1000 --input-mean 500 --input-stdev 0 "
    "--output-mean 200 --output-stdev 0"
)


class Row(DatasetRow):
    """One whose end can be seen."""

    __slots__ = ("__weakref__",)


@pytest.fixture
def demo(repository):
    return repository / "examples" / "demo-target"


@pytest.fixture
def make(llmctl, demo):
    """Rows of a command line."""

    def call(words: str, *argv, tokenizer=demo):
        done = llmctl("dataset", f"--tokenizer={tokenizer}", *shlex.split(words), *argv)
        assert done.code == 0, done
        return [json.loads(line) for line in done.out.splitlines()]

    return call


def test_the_articles_command_runs_as_printed(make):
    rows = make(ARTICLE)
    assert len(rows) == 1000
    assert all(list(row) == ["task_id", "input_ids", "output_tokens"] for row in rows)
    assert [row["task_id"] for row in rows] == list(range(1000))
    assert {len(row["input_ids"]) for row in rows} == {500}
    assert {row["output_tokens"] for row in rows} == {200}


def test_random_prompts_hold_every_ordinary_token_and_no_special_one(make, demo):
    full = AutoTokenizer.from_pretrained(demo)
    seen = {token for row in make(ARTICLE) for token in row["input_ids"]}
    assert seen == set(range(len(full))) - set(full.all_special_ids)


def test_the_text_is_not_replaced_by_the_rows_made_of_it(llmctl, demo, tmp_path):
    text = tmp_path / "prompts.txt"
    text.write_text("def f(x):\n")
    words = f"--tokenizer {demo} --output {text} text --input-file {text} --output-len-dist 6,0"
    done = llmctl("dataset", *words.split())
    assert done.code == 2 and "is read, and would be replaced" in done.err
    assert text.read_text() == "def f(x):\n"


def test_a_seed_makes_the_same_rows_and_another_seed_others(make):
    words = f"{NORMAL} --num-requests 5"
    assert make(words) == make(f"--random-seed 420 {words}")
    assert make(words) != make(f"--random-seed 421 {words}")


def test_normal_lengths_are_rounded_up_and_at_least_one():
    generator = np.random.default_rng(0)
    drawn = [NormalLengths(3, 2).draw(generator) for _ in range(4000)]
    assert min(drawn) == 1 and np.mean(drawn) == pytest.approx(3.5, abs=0.15)
    assert NormalLengths(2.2, 0).draw(generator) == 3


def test_uniform_lengths_include_both_ends_alike():
    generator = np.random.default_rng(0)
    counts = Counter(UniformLengths(3, 6).draw(generator) for _ in range(4000))
    assert sorted(counts) == [3, 4, 5, 6] and min(counts.values()) > 900


def test_uniform_rows_stay_within_their_bounds(make):
    rows = make(f"{UNIFORM} --num-requests 40")
    assert {len(row["input_ids"]) for row in rows} == {3, 4, 5, 6}
    assert {row["output_tokens"] for row in rows} == {1, 2}


def test_a_file_gets_the_lines_that_stdout_would_and_stderr_a_summary(llmctl, make, demo, tmp_path):
    path = tmp_path / "rows.jsonl"
    words = ["dataset", "--tokenizer", demo, "--output", path]
    done = llmctl(*words, *shlex.split(NORMAL), "--num_requests", 4)
    assert done.code == 0 and done.out == ""
    assert done.err.startswith("4 requests: input tokens ")
    assert [json.loads(line) for line in path.read_text().splitlines()] == make(
        f"{NORMAL} --num-requests 4"
    )


def test_rows_are_written_one_after_another_and_not_kept(tmp_path):
    made = []

    def rows():
        for nth in range(1, 6):
            assert all(row() is None for row in made[:-1]), "the last one is still at hand"
            row = Row(range(nth), 10 * nth)
            made.append(weakref.ref(row))
            yield row
            del row

    written = write_rows(rows(), tmp_path / "rows.jsonl", None)
    assert summary(written) == (
        "5 requests: input tokens 1 to 5, mean 3.0; output tokens 10 to 50, mean 30.0"
    )
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == 5


def test_a_file_that_stdout_is_redirected_into_gets_the_rows_too(forked_program, demo, tmp_path):
    named, caught, log = (tmp_path / name for name in ("rows.json", "synthetic.txt", "log.txt"))
    kind = [*shlex.split(NORMAL), "--num-requests", "4"]
    command = [
        *forked_program.command,
        "dataset",
        "--tokenizer",
        str(demo),
        "--output",
        str(named),
        *kind,
    ]
    with caught.open("w") as stdout:
        done = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, check=True)
    assert len(named.read_text().splitlines()) == 4
    assert caught.read_text() == named.read_text()
    assert done.stderr.startswith(f"rows are in {named}, and on stdout, which is a file")
    with log.open("w") as both:  # a log is no place for rows
        subprocess.run(command, stdout=both, stderr=subprocess.STDOUT, check=True)
    assert log.read_text().startswith("4 requests: ")
    piped = subprocess.run(command, capture_output=True, text=True, check=True)
    assert piped.stdout == ""


def test_an_engines_own_tokenizer_will_do(make, engines):
    rows = make(f"{UNIFORM} --num-requests 30", tokenizer=engines.target)
    assert max(max(row["input_ids"]) for row in rows) < 1000


def test_a_models_name_is_looked_up_on_the_hub(monkeypatch, demo):
    def snapshot_download(name, allow_patterns):
        assert (name, allow_patterns[0]) == ("some/model", "tokenizer.json")
        return str(demo)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert len(open_tokenizer("some/model").ordinary_ids) == 4093


def test_a_name_the_hub_cannot_give_is_a_named_error(llmctl):
    done = llmctl("dataset", "--tokenizer", "some/model", *shlex.split(ARTICLE))
    assert done.code == TokenizerError.exit_code and "error[TokenizerError]" in done.err
    assert "some/model is no folder" in done.err and "fix: name a folder" in done.err


@pytest.mark.parametrize("name", ["gpt2", "/no/folder", "a/b/c"])
def test_a_name_that_no_model_on_the_hub_has_is_told_their_form(name):
    with pytest.raises(TokenizerError, match=f"{name} is no folder, and no OWNER/NAME") as caught:
        open_tokenizer(name)
    assert "OWNER/NAME" in caught.value.fix


def test_a_file_is_no_tokenizers_folder(demo):
    with pytest.raises(TokenizerError, match=r"tokenizer.json is a file; the folder") as caught:
        open_tokenizer(str(demo / "tokenizer.json"))
    assert caught.value.fix == f"give {demo}"


# ---- text ----


def test_rows_of_text_are_prompts_in_the_files_order(make, demo, tmp_path):
    full = AutoTokenizer.from_pretrained(demo)
    path = tmp_path / "lines.txt"
    path.write_text("def add(a, b):\n\nclass Bar:\n")
    rows = make(f"text --input-file {path} --output-len-dist 5,0")
    assert [row["input_ids"] for row in rows] == [
        full("def add(a, b):").input_ids,
        full("class Bar:").input_ids,
    ]
    assert [row["output_tokens"] for row in rows] == [5, 5]


def test_fewer_rows_than_were_asked_for_are_said(llmctl, demo, tmp_path):
    path = tmp_path / "lines.txt"
    path.write_text("def add(a, b):\n", encoding="utf-8-sig")
    text = ("text", "--input-file", path, "--output-len-dist", "5,0", "--num-requests")
    done = llmctl("dataset", "--tokenizer", demo, *text, 3)
    assert done.err.startswith("1 request of the 3 requested, as the file has no more: "), done.err
    assert llmctl("dataset", "--tokenizer", demo, *text, 1).err.startswith("1 request: input")
    wanted = AutoTokenizer.from_pretrained(demo)("def add(a, b):").input_ids
    assert json.loads(done.out)["input_ids"] == wanted, "the byte order mark is no part of it"


def test_outputs_are_as_long_as_the_golden_text_and_long_prompts_are_skipped(make, demo, tmp_path):
    full = AutoTokenizer.from_pretrained(demo)
    path = tmp_path / "rows.jsonl"
    records = [{"question": "x = " * 50, "answer": "y"}, {"question": "x =", "answer": "f(1)\n"}]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    keys = "--dataset-input-key question --dataset-output-key answer --dataset-prompt #"
    (row,) = make(f"text --dataset-name {path} {keys} --max-input-len 20")
    assert row["input_ids"] == full("# x =").input_ids
    assert row["output_tokens"] == len(full("f(1)\n", add_special_tokens=False).input_ids)


def test_windows_are_pieces_of_the_text(make, demo, repository):
    path = repository / "examples" / "heldout.txt"
    full = AutoTokenizer.from_pretrained(demo)
    stream = full(path.read_text(), add_special_tokens=False).input_ids
    text = " ".join(map(str, stream))
    rows = make(f"text --input-file {path} --num-requests 6 --input-len-dist 64,8 "
                "--output-len-dist 16,0")  # fmt: skip
    assert len({tuple(row["input_ids"]) for row in rows}) == 6
    assert all(" ".join(map(str, row["input_ids"])) in text for row in rows)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (f"{NORMAL} --num-requests 0", "num-requests"),
        (f"{UNIFORM} --num-requests {10**12}", "'--num-requests': Input should be less than"),
        (
            f"text --input-file x.txt --output-len-dist 5,0 --num-requests {10**6 + 1}",
            "less than or equal to 1000000; found '1000001'",
        ),
        ("--stdout --output x.jsonl " + UNIFORM + " --num-requests 1", "--stdout and --output"),
        (NORMAL.replace("mean 20", "mean -1") + " --num-requests 1", "mean length is -1.0"),
        (NORMAL.replace("stdev 4", "stdev -4") + " --num-requests 1", "standard deviation is -4.0"),
        (UNIFORM.replace("max 6", "max 2") + " --num-requests 1", "lengths from 3 to 2"),
        ("text --input-file none.txt --output-len-dist 5,0", "none.txt does not exist"),
        ("text --input-file none.txt", "exactly one is wanted"),
        ("text --input-file none.txt --output-len-dist 5", "the form mean,stdev"),
        ("text --input-file none.txt --output-len-dist 5,0 --input-len-dist 5,0", "--num-requests"),
    ],
)
def test_impossible_rows_are_refused_by_name(llmctl, demo, words, said):
    done = llmctl("dataset", "--tokenizer", demo, *shlex.split(words))
    assert done.code == BadConfig.exit_code and said in done.err and done.out == ""


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("x.jsonl", '{"prompt": "a"}', "no string 'text'; its keys are prompt"),
        ("x.jsonl", "[1]", "line 1 is list"),
        ("x.jsonl", "{", "line 1 is not JSON"),
        ("x.txt", "\n\n", "holds no text"),
        ("x.csv", "1", "must end in .txt or .jsonl"),
    ],
)
def test_a_bad_text_file_is_named_with_its_line(llmctl, demo, tmp_path, name, content, said):
    path = Path(tmp_path / name)
    path.write_text(content)
    done = llmctl("dataset", "--tokenizer", demo, "text", "--input-file", path,
                  "--output-len-dist", "4,0")  # fmt: skip
    assert done.code == BadConfig.exit_code and said in done.err


def test_a_missing_tokenizer_is_said(llmctl):
    done = llmctl("dataset", *shlex.split(NORMAL), "--num-requests", 1)
    assert done.code == BadConfig.exit_code and "--tokenizer is missing" in done.err


@pytest.mark.parametrize(
    "words",
    [
        "token-norm-dist --input-mean 1e30 --input-stdev 0",
        "token-norm-dist --input-mean 5 --input-stdev 1e300",
        "token-norm-dist --input-mean nan --input-stdev 0",
        "token-unif-dist --input-min 1 --input-max 9223372036854775808",
    ],
)
def test_lengths_beyond_what_engines_count_are_refused(llmctl, engines, words):
    kind, *inputs = words.split()
    outputs = [word.replace("input", "output") for word in inputs]
    done = llmctl("dataset", "--tokenizer", engines.target, "--stdout", kind,
                  "--num-requests", 1, *inputs, *outputs)  # fmt: skip
    assert done.code == 2 and "error[BadConfig]" in done.err and done.out == ""
