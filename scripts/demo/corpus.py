"""The demo corpus: Python's standard library, split by module path into training and held-out.

A document is named by its path below the library folder (`asyncio/tasks.py`), whatever Python
version it comes from, and the split hashes that name. So a module is held out of every version at
once, and adding a version moves nothing. Modules do get renamed between versions (`datetime.py`
became `_pydatetime.py`); `drop_leaks` therefore also removes training documents that contain the
text of a held-out one.
"""

from __future__ import annotations

import ast
import hashlib
import re
import sysconfig
import tarfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HELD_OUT_PER_MILLE = 25
"""Share of documents held out, in thousandths."""

TOPICS = "pydoc_data/topics.py"
"""The language reference as `help()` prints it: a dict of texts, read as one document each."""

_EXCLUDED = re.compile(
    r"(^|/)(site-packages|__pycache__|encodings|lib-dynload|config-[^/]*)/"
    r"|(^|/)(_sysconfigdata[^/]*|antigravity)\.py$"  # the former holds paths of the build machine
    r"|/bad_?[^/]*\.py$"  # deliberately broken source
)
_LIBRARY = re.compile(r"^(?:.*/)?python\d\.\d+/")
_MIN_CHARS = 200
_TABLE_MIN_CHARS = 10_000
_TABLE_LETTERS = 0.65  # letters and blanks; source has 0.75 to 0.90, tables of numbers below 0.65
_LONG_LINE = 24  # shorter lines (`return None`, `"""`) say nothing about where a text came from
_LEAK_SHARE = 0.2


@dataclass(frozen=True, slots=True)
class Document:
    """One text; `name` is the module path, equal in all Python versions."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Corpus:
    """The split. `train` and `held_out` share no name, and no text beyond `_LEAK_SHARE`."""

    train: list[Document]
    held_out: list[Document]
    leaks: list[str]
    """Names of documents dropped because they repeat a held-out one."""


def is_held_out(name: str) -> bool:
    """Whether the document of this name is never trained on. Depends on the name alone."""
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:8], "big") % 1000 < HELD_OUT_PER_MILLE


def module_name(path: str) -> str:
    """The part of a path that all versions share: `lib/python3.12/os.py` is `os.py`."""
    return _LIBRARY.sub("", path)


def read_corpus(source: Path | None = None) -> Corpus:
    """Read a folder or .tar.xz of sources; by default the running Python's standard library.

    Several versions may lie side by side (`python3.11/`, `python3.12/` ...). Equal texts count
    once. Raises SystemExit when nothing usable is found.
    """
    source = source or Path(sysconfig.get_path("stdlib"))
    if not source.exists():
        raise SystemExit(f"--corpus {source}: no such folder or archive")
    train: list[Document] = []
    held_out: list[Document] = []
    seen: set[str] = set()
    for document in _documents(source):
        if document.text not in seen:
            seen.add(document.text)
            (held_out if is_held_out(document.name) else train).append(document)
    if not train or not held_out:
        raise SystemExit(
            f"{source}: {len(train)} training and {len(held_out)} held-out documents; both are "
            "needed. Give a folder or .tar.xz with the .py files of a standard library"
        )
    train, leaks = drop_leaks(train, held_out)
    return Corpus(train, held_out, leaks)


def drop_leaks(train: list[Document], held_out: list[Document]) -> tuple[list[Document], list[str]]:
    """Split off training documents that hold a fifth or more of a held-out document's long lines.

    Returns the documents kept and the names of those dropped.
    """
    owners: dict[str, list[int]] = {}
    sizes: list[int] = []
    for index, document in enumerate(held_out):
        lines = _long_lines(document.text)
        sizes.append(len(lines))
        for line in lines:
            owners.setdefault(line, []).append(index)
    kept: list[Document] = []
    dropped: list[str] = []
    for document in train:
        shared: Counter[int] = Counter()
        for line in _long_lines(document.text):
            shared.update(owners.get(line, ()))
        leaks = any(num >= max(3, _LEAK_SHARE * sizes[index]) for index, num in shared.items())
        if leaks:
            dropped.append(document.name)
        else:
            kept.append(document)
    return kept, sorted(set(dropped))


def write_sample(documents: list[Document], path: Path, max_bytes: int) -> None:
    """Write held-out documents, each under a `##### NAME` line, up to `max_bytes` in all.

    Takes one text per name (the last, so the newest version) of 2 to 16 KB, in the order of the
    names' hashes, so that the sample crosses the library.
    """
    latest = {document.name: document.text for document in documents}
    parts: list[str] = []
    total = 0
    for name in sorted(latest, key=lambda name: hashlib.sha256(name.encode()).digest()):
        part = f"##### {name}\n{latest[name].rstrip()}\n"
        size = len(part.encode())
        if 2_000 <= size <= 16_000 and total + size <= max_bytes:
            parts.append(part)
            total += size
    path.write_text("".join(parts), "utf-8")


def read_sample(path: Path) -> list[Document]:
    """Read what `write_sample` wrote; a file without `##### NAME` lines is one document."""
    pieces = re.split(r"^##### (\S+)\n", path.read_text("utf-8"), flags=re.MULTILINE)
    documents = [Document(path.name, pieces[0])] if pieces[0].strip() else []
    documents += [Document(*pair) for pair in zip(pieces[1::2], pieces[2::2], strict=True)]
    return documents


def _documents(source: Path) -> Iterator[Document]:
    for path, data in _files(source):
        name = module_name(path)
        if not name.endswith(".py") or _EXCLUDED.search(name) or _EXCLUDED.search(path):
            continue
        try:
            text = data.decode("utf-8").replace("\r\n", "\n")
        except UnicodeDecodeError:  # test data in other encodings
            continue
        if name == TOPICS:
            yield from _topics(text)
        elif len(text) >= _MIN_CHARS and not _is_table(text):
            yield Document(name, text)


def _files(source: Path) -> Iterator[tuple[str, bytes]]:
    """Paths relative to `source` and contents, in sorted order."""
    if source.is_dir():
        for path in sorted(source.rglob("*.py")):
            if path.is_file():
                yield path.relative_to(source).as_posix(), path.read_bytes()
        return
    with tarfile.open(source) as archive:
        for member in sorted(archive.getmembers(), key=lambda member: member.name):
            content = archive.extractfile(member) if member.isfile() else None
            if content is not None:
                yield member.name, content.read()


def _topics(source: str) -> Iterator[Document]:
    """The texts of `pydoc_data/topics.py` as documents named `pydoc_data/topics.py#TOPIC`."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            for topic, text in ast.literal_eval(node.value).items():
                yield Document(f"{TOPICS}#{topic}", text)


def _is_table(text: str) -> bool:
    if len(text) < _TABLE_MIN_CHARS:
        return False
    letters = sum(char.isalpha() or char.isspace() for char in text)
    return letters < _TABLE_LETTERS * len(text)


def _long_lines(text: str) -> set[str]:
    """The distinct lines that can identify a text. Licence headers and imports cannot."""
    lines = (line.strip() for line in text.splitlines())
    return {
        line for line in lines if len(line) >= _LONG_LINE and not line.startswith(("#", "from"))
    }
