"""Small and read-only file systems, where this user may mount them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

Mount = Callable[..., Path]


def _mount(*words: object) -> None:
    done = subprocess.run(["mount", *map(str, words)], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"this user may not mount: {done.stderr.strip()}")


@contextmanager
def mounts(folder: Path) -> Iterator[Mount]:
    """mount(size="64k", nr_inodes=8): the root of a new tmpfs with these options."""
    made: list[Path] = []

    def mount(**options: object) -> Path:
        if os.geteuid() != 0:
            pytest.skip("only root may mount a file system")
        path = folder / f"disk{len(made)}"
        path.mkdir()
        text = ",".join(f"{name}={value}" for name, value in options.items())
        _mount("-t", "tmpfs", "-o", text or "size=1m", "tmpfs", path)
        made.append(path)
        return path

    try:
        yield mount
    finally:
        for path in made:
            subprocess.run(["umount", "-l", str(path)], check=True)


def make_read_only(folder: Path) -> None:
    """From now on nothing can be written there; for root it must be a file system of its own."""
    if os.geteuid() == 0:
        _mount("-o", "remount,ro", folder)
    else:
        folder.chmod(0o555)
