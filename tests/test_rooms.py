"""Questions that one folder owns are not asked elsewhere.

A row is a pattern of Python code and the folders that may hold it. Whoever needs the answer asks
the object that knows: `BACKENDS[name]`, a `DraftMethod`, a weight scheme, an architecture.
"""

from __future__ import annotations

import io
import re
import tokenize
from functools import cache
from pathlib import Path

import pytest

SOURCES = ("cli", "quantize", "builder", "runtime", "plugins")
ROOMS: dict[str, tuple[str, ...]] = {
    # which backend: the table, the choice of one, and TensorRT's two packages among themselves
    r"\bbackend (==|!=|in|not in) ?[\"(]": (
        "plugins/backends",
        "builder/backends.py",
        "builder/tensorrt",
        "runtime/engines",
    ),
    r"\bTENSORRT_BACKENDS\b": (),
    # is there a draft: the methods, which include plain decoding
    r"\b(draft|drafter|draft_engine|speculation) is (not )?None\b": ("runtime/drafting",),
    r"\bhas_(draft|engine|draft_engine)\b": (),
    # which drafter or method: it says itself what others need to know; one that knows how likely
    # its drafts are has a protocol, and --tune-tree is about the trees of one method
    r"isinstance\(([\w.]+\.)?_?(drafter|on_device|method),": (
        "runtime/drafting",
        "runtime/assembly.py",
        "cli/bench/tree.py",
    ),
    r"\bdraft_kv_len\b|\bnum_drafted\b": (),
    # the time of day, which may be set back: timestamps for people, never a duration
    r"\btime\.time\(|from time import .*\btime\b|datetime\.(now|utcnow|today)": (
        "runtime/stats/recorder.py",
    ),
    # of which scheme weights are: the tables; a backend and the one launch state what they multiply
    r"(?i)mxfp4|\balgo (==|!=|in|not in) ": (
        "plugins/schemes",
        "builder/schemes",
        "quantize/schemes",
        "plugins/backends/backend.py",
        "plugins/fused/decoder_layers/chain.py",
    ),
    # what a GPU generation has; cli/gpus.py lists products with their compute capability
    r"sm_\d\d|\b227 ?(<<|\*)|\"(8\.6|8\.9|9\.0|12\.0)\"|\((8|9|12), ?\d\)": (
        "plugins/backends/cuda/arch.py",
        "cli/gpus.py",
    ),
}


@cache  # a second of CPU time for all files, which every pattern reads
def code_lines(path: Path) -> list[str]:
    """The lines of a file without comments and strings of their own (docstrings)."""
    text = path.read_text()
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        is_docstring = token.type == tokenize.STRING and token.string.startswith(('"""', 'r"""'))
        if token.type == tokenize.COMMENT or is_docstring:
            (first, start), (last, stop) = token.start, token.end
            for number in range(first - 1, last):
                line = lines[number]
                begin = start if number == first - 1 else 0
                end = stop if number == last - 1 else len(line)
                lines[number] = line[:begin] + " " * (end - begin) + line[end:]
    return lines


@pytest.mark.parametrize("pattern", ROOMS)
def test_a_question_is_asked_where_it_belongs(repository: Path, pattern: str) -> None:
    found = []
    for folder in SOURCES:
        for path in sorted((repository / folder).rglob("*.py")):
            name = path.relative_to(repository).as_posix()
            if name.startswith(ROOMS[pattern]) and ROOMS[pattern]:
                continue
            found += [
                f"{name}:{number}: {line.strip()}"
                for number, line in enumerate(code_lines(path), 1)
                if re.search(pattern, line)
            ]
    assert not found, "\n".join(found)


def test_the_check_sees_code_and_no_prose(tmp_path: Path) -> None:
    path = tmp_path / "x.py"
    path.write_text('"""Where draft is None."""\nif draft is None:  # draft is None\n    pass\n')
    assert [re.search("draft is None", line) is not None for line in code_lines(path)] == [
        False,
        True,
        False,
    ]
    assert code_lines(path)[1].count("draft is None") == 1


def test_a_file_is_read_in_one_sitting(repository: Path) -> None:
    folders = (*SOURCES, "scripts", "tests", "docs")
    kinds = {".py", ".cu", ".cuh", ".cpp", ".h", ".md"}
    files = [path for folder in folders for path in (repository / folder).rglob("*")]
    long = [
        path.relative_to(repository).as_posix()
        for path in files
        if path.suffix in kinds and len(path.read_text().splitlines()) > 300
    ]
    assert not long, "over 300 lines: " + ", ".join(long)
