"""What lies where a file is wanted."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
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

# What a clone without Git LFS has in the place of a large file: three short lines of text.
LFS_POINTER = "a Git LFS pointer (git lfs pull fetches what it stands for)"


def _is_lfs_pointer(path: Path) -> bool:
    if path.stat().st_size > 1024:  # git-lfs's own bound
        return False
    with suppress(OSError), path.open("rb") as file:  # may not be read: said where it is read
        return file.read(40).startswith(b"version https://git-lfs.github.com/spec/")
    return False


def not_a_file(path: Path) -> str | None:
    """What lies there and is no file, for people; None for a file, and where nothing is."""
    if path.is_file():
        return LFS_POINTER if _is_lfs_pointer(path) else None
    if not os.path.lexists(path):
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


def why_no_file(path: Path) -> str | None:
    """Why a path that was given cannot be read, behind its name; None for a file."""
    found = not_a_file(path)
    if found is not None:
        return f"is {found}; a file is wanted"
    return None if path.is_file() else "does not exist"
