"""What lies where a file is wanted."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from llmctl.errors import CorruptFile

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFLNK: "a link that leads to itself",
}


def not_a_file(path: Path) -> str | None:
    """What lies there and is no file, for people; None for a file, and where nothing is."""
    if path.is_file() or not os.path.lexists(path):
        return None
    if path.is_symlink() and not path.exists():
        target = os.readlink(path)
        is_loop = os.path.lexists(path.parent / target)
        return _KINDS[stat.S_IFLNK] if is_loop else f"a link to {target}, which does not exist"
    return _KINDS.get(stat.S_IFMT(path.stat().st_mode), "no file")


def has_file(path: Path) -> bool:
    """Whether a file is there. Raises CorruptFile for anything else in its place: it would be taken
    for missing, though somebody put it there."""
    found = not_a_file(path)
    if found is not None:
        raise CorruptFile(
            f"{path} is {found}; a file is wanted", fix="put the file there, or remove what is"
        )
    return path.is_file()


def why_no_file(path: Path) -> str:
    """Why a path that was given cannot be read, behind its name."""
    found = not_a_file(path)
    return "does not exist" if found is None else f"is {found}; a file is wanted"
