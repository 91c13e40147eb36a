"""How an artefact gets its final name: write to a scratch folder, fsync, rename.

Whatever interrupts the body (an exception, Ctrl-C, a full disk), nothing exists under the final
name; kill -9 can leave only a hidden `.NAME.<random>.partial` directory next to it.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llmctl.errors import BadConfig, OutOfDisk, OutputExists

# The last one is the size limit of one file: FAT32's 4 GB, or `ulimit -f`.
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_MOST_NAME = 255 - len("..12345678.partial")  # bytes: what a scratch directory has beside the name


def created_mode(bits: int) -> int:
    """The mode that a new file or folder of these bits gets here, after the umask."""
    mask = os.umask(0o077)
    os.umask(mask)
    return bits & ~mask


def flush(path: Path) -> None:
    """fsync one file or directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def require_space(folder: Path, num_bytes: int) -> None:
    """Refuse before the first byte when `num_bytes` will not fit the file system of `folder`."""
    existing = folder
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    if num_bytes > free:
        raise OutOfDisk(
            f"{folder} needs {num_bytes / 1e9:.3g} GB, {existing} has {free / 1e9:.3g} GB free",
            fix="free disk space or choose an output directory on another file system",
        )


def _remove(scratch: Path) -> None:
    """Remove a scratch directory completely, however often Ctrl-C is pressed meanwhile."""
    while True:
        try:
            shutil.rmtree(scratch, ignore_errors=True)
            return
        except KeyboardInterrupt:
            continue


def require_place(final: Path) -> None:
    """Refuse before any work what `publish` would refuse after it: a name that is taken, or a place
    that cannot be written. Raises OutputExists and BadConfig."""
    final = final.absolute()
    if os.path.lexists(final):  # also a link that leads nowhere
        raise OutputExists(final)
    folder = next(parent for parent in final.parents if os.path.lexists(parent))
    if len(os.fsencode(final.name)) > _MOST_NAME:
        why = f"its name is longer than {_MOST_NAME} bytes"
    elif not os.path.isdir(folder):
        why = f"{folder} is not a folder"
    elif not os.access(folder, os.W_OK | os.X_OK):
        why = f"{folder} cannot be written"
    else:
        return
    raise BadConfig(f"nothing can be written to {final}: {why}", fix="choose another output folder")


@contextmanager
def publish(final: Path) -> Iterator[Path]:
    """Yield a scratch directory beside `final`; it takes the final name only on success.

    Raises OutputExists when `final` exists before, or appears while the body runs; OutOfDisk when
    the body or the final fsync ran out of space.
    """
    final = final.absolute()
    if os.path.lexists(final):
        raise OutputExists(final)
    final.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{final.name}.", suffix=".partial", dir=final.parent))
    try:
        yield scratch
        for path in [*scratch.rglob("*"), scratch]:
            flush(path)
        scratch.chmod(created_mode(0o777))  # mkdtemp starts at 0700
        try:
            os.rename(scratch, final)  # atomic on one file system; refuses a non-empty target
        except OSError as error:
            if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                raise OutputExists(final) from error  # another process won the race
            raise
        flush(final.parent)
    except OSError as error:
        _remove(scratch)
        if error.errno in DISK_FULL:
            raise OutOfDisk(
                f"the file system of {final.parent} is full ({error.strerror})",
                fix="free disk space or choose an output directory on another file system",
            ) from error
        if error.filename is None:  # a write's: the system does not say where it was
            error.filename = str(final)
        raise
    except BaseException:  # Ctrl-C included: never leave something that looks finished
        _remove(scratch)
        raise
