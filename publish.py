"""How an artefact gets its final name: write to a scratch folder, fsync, rename.

Whatever interrupts the body (an exception, Ctrl-C, a full disk), nothing exists under the final
name; kill -9 can leave only a hidden `.NAME.<random>.partial` next to it, a directory or a file,
which the next attempt removes. A lock, which ends with the process that holds it, tells a leftover
from an output that is being written. A signal may fall between the making of a scratch and the
first line that would remove it, so each is listed before it is made: `remove_unfinished`.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from llmctl.errors import BadConfig, OutOfDisk, OutputExists

# Errors of a write that has no room. The last is of a file: FAT32's 4 GB, or `ulimit -f`.
SPACE_FIXES = {
    errno.ENOSPC: "free disk space",
    errno.EDQUOT: "free disk space",
    errno.EFBIG: "raise the limit on the size of a file (ulimit -f)",
}
SCRATCH_SUFFIX = ".partial"
MOST_NAME = 255 - len("..12345678" + SCRATCH_SUFFIX)  # bytes: the scratch's name must fit, too
_scratches: list[Path] = []  # every one that this process has made or was about to make


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
            f"{num_bytes / 1e9:.3g} GB are to be written to {folder}; its file system has "
            f"{free / 1e9:.3g} GB free",
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
    if len(os.fsencode(final.name)) > MOST_NAME:
        why = f"its name is longer than {MOST_NAME} bytes"
    elif not os.path.isdir(folder):
        why = f"{folder} is not a folder"
    elif not os.access(folder, os.W_OK | os.X_OK):
        why = f"{folder} cannot be written"
    else:
        return
    raise BadConfig(f"nothing can be written to {final}: {why}", fix="choose another output folder")


def lock_scratch(descriptor: int, path: Path) -> bool:
    """Mark a scratch directory or file, just made and open, as being written for as long as the
    descriptor or a copy of it is open. False where another process took it for a leftover."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks: nothing there is ever taken for a leftover
        return True
    return os.path.lexists(path)


def remove_leftovers(final: Path) -> list[Path]:
    """Remove what killed processes of this user left of earlier attempts at `final`; returns what
    it removed. What a living process writes is left alone."""
    final = final.absolute()
    pattern = re.compile(rf"\.{re.escape(final.name)}\.[a-z0-9_]{{8}}{re.escape(SCRATCH_SUFFIX)}")
    try:
        found = [path for path in final.parent.iterdir() if pattern.fullmatch(path.name)]
    except OSError:  # no such folder, or none that may be read
        return []
    return [path for path in sorted(found) if _remove_leftover(path)]


def _remove_leftover(path: Path) -> bool:
    """Whether it was one, and is gone."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:  # it has got its name meanwhile, or is no file of ours
        return False
    try:
        found = os.fstat(descriptor)
        is_folder = stat.S_ISDIR(found.st_mode)
        if found.st_uid != os.geteuid() or not (is_folder or stat.S_ISREG(found.st_mode)):
            return False
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if is_folder:
            shutil.rmtree(path)
        else:
            path.unlink()
    except OSError:  # locked: it is being written; or a file system that has no locks
        return False
    finally:
        os.close(descriptor)
    return True


def open_scratch(final: Path, *, is_folder: bool = False) -> tuple[Path, int]:
    """A scratch file or directory beside `final` that nobody else may read yet, and the descriptor,
    of a file for reading and writing, that holds its lock. Raises OSError."""
    while True:
        scratch = final.with_name(f".{final.name}.{secrets.token_hex(4)}{SCRATCH_SUFFIX}")
        _scratches.append(scratch)
        try:
            if is_folder:
                scratch.mkdir(0o700)
            else:
                os.close(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        except FileExistsError:  # another process's
            _scratches.remove(scratch)
            continue
        try:
            descriptor = os.open(scratch, os.O_RDONLY if is_folder else os.O_RDWR)
        except FileNotFoundError:  # taken for a leftover before it had its lock
            continue
        if lock_scratch(descriptor, scratch):
            return scratch, descriptor
        os.close(descriptor)


def remove_unfinished() -> None:
    """Remove each scratch of this process that is still there; for the end of a program, when no
    signal can come any more. It has nothing to do but where a signal came while one was made."""
    for scratch in _scratches:
        if scratch.is_dir():
            shutil.rmtree(scratch, ignore_errors=True)
        else:
            with suppress(OSError):
                scratch.unlink()


def write_cached(path: Path, content: bytes) -> None:
    """Write a file of a cache, whole or not at all. A folder that cannot be written, or that is
    full, costs time later, and is no failure."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch, descriptor = open_scratch(path)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
            os.replace(scratch, path)
        except BaseException:
            scratch.unlink(missing_ok=True)
            raise


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
    scratch, lock = open_scratch(final, is_folder=True)
    try:
        yield scratch
        for path in [*scratch.rglob("*"), scratch]:
            flush(path)
        scratch.chmod(created_mode(0o777))  # it was made with 0700
        try:
            os.rename(scratch, final)  # atomic on one file system; refuses a non-empty target
        except OSError as error:
            if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                raise OutputExists(final) from error  # another process won the race
            raise
        flush(final.parent)
    except OSError as error:
        _remove(scratch)
        if error.errno in SPACE_FIXES:
            where = "choose an output directory on another file system"
            raise OutOfDisk(
                f"a file of {final} may not be that large ({error.strerror})"
                if error.errno == errno.EFBIG
                else f"the file system of {final.parent} is full ({error.strerror})",
                fix=f"{SPACE_FIXES[error.errno]} or {where}",
            ) from error
        if error.filename is None:  # a write's: the system does not say where it was
            error.filename = str(final)
        raise
    except BaseException:  # Ctrl-C included: never leave something that looks finished
        _remove(scratch)
        raise
    finally:
        os.close(lock)
