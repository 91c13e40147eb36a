"""examples/article.sh, line by line: the published commands for a draft and its target.

The lines are the script's own; only its paths are given and its sizes made small.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path
from string import Template

import pytest

from llmctl.cli.main import execute

SIZES = {  # option -> its value here; the script's are the article's
    "--calib_size": "2",
    "--max_num_tokens": "256",
    "--max_seq_len": "512",
    "--max_batch_size": "4",
    "--max_output_len": "48",
    "--kv_cache_free_gpu_memory_fraction": "0.01",
    "--num-requests": "6",
    "--num_requests": "3",
    "--input-mean": "20",
    "--output-mean": "8",
}


def article_lines(script: Path, folder: Path, examples: Path) -> list[list[str]]:
    """The words of every `llmctl ...` line; a redirection is the last two."""
    paths = {
        "out": str(folder),
        "target": str(examples / "demo-target"),
        "draft": str(examples / "demo-draft"),
    }
    text = script.read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.startswith("llmctl ")]
    return [_smaller(shlex.split(Template(line).substitute(paths))[1:]) for line in lines]


def _smaller(words: list[str]) -> list[str]:
    found = []
    previous = ""
    for word in words:
        name, joined, _ = word.partition("=")
        if previous in SIZES:
            word = SIZES[previous]
        elif joined and name in SIZES:
            word = f"{name}={SIZES[name]}"
        found.append(word)
        previous = word
    if words[0] == "quantize":  # rows are as long as they can be unless a line says otherwise
        found += ["--calib_max_seq_length", "32"]
    return found


@pytest.fixture(scope="module")
def lines(tmp_path_factory, repository) -> list[list[str]]:
    folder = tmp_path_factory.mktemp("article")
    return article_lines(repository / "examples/article.sh", folder, repository / "examples")


def test_the_articles_commands_run_to_the_end_and_the_draft_changes_no_text(
    lines, capsys, forked_program
):
    said, printed = {}, {}
    for number, words in enumerate(lines):
        name = f"{words[0]} {number}"
        if ">" in words:  # a shell's: stdout of a process of its own
            *words, _, file = words
            command = [*forked_program.command, *words]
            with open(file, "w") as stdout:
                done = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True)
            assert done.returncode == 0, done.stderr
            rows = Path(file).read_text().splitlines()
            assert [json.loads(row)["output_tokens"] for row in rows] == [8] * 6
            continue
        if words[0] == "quantize":  # in a process that has imported ModelOpt
            command = [*forked_program.command, *words]
            done = subprocess.run(command, capture_output=True, text=True)
            printed[name], said[name] = done.stdout, done.stderr
            assert done.returncode == 0, done.stderr
            continue
        capsys.readouterr()
        code = execute(words)
        printed[name], said[name] = capsys.readouterr()
        assert code == 0, (words, said[name])
    commands = [name.split()[0] for name in printed]
    assert commands == ["quantize"] * 2 + ["build"] * 2 + ["run"] * 2 + ["bench"] * 2

    drafted, plain = (name for name in printed if name.startswith("run"))
    assert printed[drafted] == printed[plain]
    assert re.search(r'^Output \[Text 0 Beam 0\]: ".{20}', printed[plain], re.M | re.S)
    listed = "[0, 1, 2, 3, 4, 5, 6, 7]"
    for role in ("draft", "target"):
        note = f"of the devices {listed} for the {role} engine a GPU's engine takes the first"
        assert note in said[drafted] and note not in said[plain]
    assert "(draft_len 10)" in said[drafted] and "acceptance" not in said[plain]
    target_build = said["build 3"]
    assert "reduce_fusion enable: the engine has one rank" in target_build

    latency, throughput = (json.loads(printed[n]) for n in printed if n.startswith("bench"))
    assert latency["request_info"]["num_finished"] == 3
    assert throughput["request_info"]["num_finished"] == 6
    assert latency["engine"]["label"].endswith("demo-target")
    assert not any("warning: --model" in text for text in said.values())


def test_the_script_tells_how_it_is_used(repository, tmp_path):
    script = repository / "examples/article.sh"
    done = subprocess.run([script], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode and "usage: examples/article.sh OUTPUT_DIR" in done.stderr
    assert not list(tmp_path.iterdir())
