"""Every example that a help text gives works, in order, on the demo pair."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any

import pytest
from support.e2e import DemoPair

from llmctl.cli.app import COMMANDS, make_command
from llmctl.cli.main import execute

# Few and short requests, and scales of a few rows, show as well that a command line works.
FEWER = {
    "latency": ["--num-requests", "2", "--target-output-len", "16"],
    "throughput": ["--num-requests", "4"],
    "quantize": ["--calib-size", "4", "--calib-max-seq-length", "32"],
}


def _examples(command: Any) -> list[list[str]]:
    """The words of every example, in the order of the commands."""
    text = (command.help or "").partition("Examples:")[2].replace("\\\n", " ")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    found = [shlex.split(line) for line in lines]
    for child in getattr(command, "commands", {}).values():
        found += _examples(child)
    return found


def test_every_example_works_from_the_root_of_the_repository(
    demo: DemoPair,
    repository: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "examples").symlink_to(repository / "examples")
    (tmp_path / "out").mkdir()
    (tmp_path / "out/draft-fp8").symlink_to(demo.quantized("draft"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    rows = '{"prompt": "import os", "output_tokens": 8}\n' * 4
    (tmp_path / "dataset.jsonl").write_text(rows)
    examples = _examples(make_command(COMMANDS))
    assert len(examples) > 20
    for words in examples:
        if words[0] == "eval":
            words = shlex.split(words[1].removeprefix("$(").removesuffix(")"))
        assert words[0] == "llmctl"
        if ">" in words:
            words = words[: words.index(">")]
        name = words[2] if words[1] == "bench" else words[1]
        words += FEWER.get(name, [])
        if name == "quantize":  # in a process that has imported ModelOpt
            assert demo.llmctl(*words[1:]) or "--output" in words, shlex.join(words)
            continue
        code = execute(words[1:])
        captured = capsys.readouterr()
        assert code == 0, f"{shlex.join(words)}\n{captured.err}"
        assert captured.out or "--output" in words, shlex.join(words)
    assert os.listdir("out")
