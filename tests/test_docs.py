"""What the documentation names exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    path.relative_to(_ROOT).as_posix()
    for path in (_ROOT / "README.md", *sorted(_ROOT.glob("docs/**/*.md")))
]
_FOLDERS = "cli|quantize|builder|runtime|plugins|tests|scripts|docs|examples"
_PATH = re.compile(rf"`((?:{_FOLDERS})/[\w./<>-]*)`")
_LINK = re.compile(r"\]\(([^)#:]+)\)")


def named(text: str) -> list[str]:
    """Paths in backquotes; `<name>` stands for any folder or file."""
    return [re.sub(r"<\w+>", "*", path) for path in _PATH.findall(text)]


@pytest.mark.parametrize("page", PAGES)
def test_every_path_exists(repository: Path, page: str) -> None:
    text = (repository / page).read_text()
    missing = [path for path in named(text) if not list(repository.glob(path.rstrip("/")))]
    links = [
        link for link in _LINK.findall(text) if not ((repository / page).parent / link).exists()
    ]
    assert not missing and not links, (missing, links)


def test_architecture_is_a_page(repository: Path) -> None:
    assert len((repository / "docs/architecture.md").read_text().splitlines()) <= 100


def test_a_path_that_is_not_there_is_seen(repository: Path) -> None:
    (path,) = named("see `runtime/<method>/nothing.py`")
    assert path == "runtime/*/nothing.py" and not list(repository.glob(path))
