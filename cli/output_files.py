"""Output files of a command: checked before any work, and complete under their name or absent.

A device or a pipe is written in place; a name of an open descriptor (/dev/stdout, /dev/fd/N) is
that descriptor, wherever it leads, so that what was written to it before stays. What killed
processes left of earlier attempts at the same name is removed, with a word on stderr.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
import sys
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import IO, Any

import typer

from llmctl.errors import BadConfig
from llmctl.publish import (
    MOST_NAME,
    created_mode,
    open_scratch,
    remove_leftovers,
    require_place,
)

JSON_LINES = (".jsonl", ".json")
"""Endings of files of JSON lines; published ones are called .json, too."""

_STANDARD = {"/dev/stdout": 1, "/dev/stderr": 2}

# Names that files of checkpoints, engines and tokenizers have, and results do not.
_MODEL_FILE = re.compile(
    r".*\.(engine|safetensors(\.index\.json)?)|(hf_quant_|generation_)?config\.json"
    r"|tokenizer(_config)?\.json"
)


def ending(*wanted: str) -> Callable[[typer.CallbackParam, Path | None], Path | None]:
    """The callback of an option that names an output file, for the parser: refuses names that end
    as those of another format do, whatever else the command line says. A name without an ending
    says nothing of a format. The callback raises BadConfig."""

    def check(param: typer.CallbackParam, value: Path | None) -> Path | None:
        if value is None:
            return None
        path, option = Path(value), param.opts[0]
        if path.suffix and path.suffix.lower() not in wanted:
            raise BadConfig(
                f"{option} is {path}; its name must end in {' or '.join(wanted)}, for that is what "
                "is written there",
                fix=f"{option} {path.with_suffix(wanted[0])}",
            )
        return value

    return check


def require_writable(*paths: Path, source: Path | None = None) -> None:
    """Refuse output files that cannot be written, before anything runs; also two that are the same
    file, one that is `source`, which is read, or one in place of a model's. Raises BadConfig."""
    seen: list[Path] = []
    for path in paths:
        try:
            final = _require_one(path)
        except (OSError, RuntimeError) as error:  # too long a name; links that lead to each other
            reason = getattr(error, "strerror", None) or error  # not the name that was tried
            raise BadConfig(f"{path} cannot be written: {reason}") from error
        if final in seen and final != Path(os.devnull):
            raise BadConfig(f"{path} is given for two outputs; each needs a file of its own")
        if source is not None and final == source.resolve():
            raise BadConfig(f"{path} is read, and would be replaced; an output needs another name")
        seen.append(final)
        _sweep(final)


def require_new_folder(path: Path) -> None:
    """Refuse an output folder that cannot be made there, before anything runs. Raises what
    `require_place` raises."""
    require_place(path)
    _sweep(path)


def _sweep(final: Path) -> None:
    """Remove leftovers, before the room that they take is counted."""
    for path in remove_leftovers(final):
        print(f"removed {path}, which a killed process left", file=sys.stderr)


def _require_one(path: Path) -> Path:
    """What the name stands for in the end."""
    final = path.resolve()
    if is_special(path):
        mode, descriptor = path.stat().st_mode, _descriptor(path)
        if stat.S_ISSOCK(mode) or not os.access(path, os.W_OK):
            raise BadConfig(f"{path} cannot be written")
        if descriptor is not None:
            if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
                raise BadConfig(f"{path} cannot be written: it is open for reading only")
        elif stat.S_ISCHR(mode):  # a terminal that is none of this process's says so at open only
            os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY))
        return final
    folder = final.parent
    if len(os.fsencode(final.name)) > MOST_NAME:
        raise BadConfig(f"{path} cannot be written: its name has over {MOST_NAME} bytes")
    if path.is_dir():
        raise BadConfig(f"{path} cannot be written: it is a folder; the name of a file is wanted")
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise BadConfig(f"{path} cannot be written: {folder} must be a writable folder")
    if final.exists() and _MODEL_FILE.fullmatch(final.name):
        raise BadConfig(
            f"{path} is there, and its name is that of a file of a checkpoint or an engine; it is "
            "not replaced",
            fix="another name for the output, or remove that file first",
        )
    if final.exists() and not (os.access(final, os.W_OK) and _may_replace(final)):
        raise BadConfig(f"{path} cannot be written: it is another user's, or read-only")
    # Where permissions say nothing: /proc, immutable folders, no file left to a user or a disk.
    scratch, handle = open_scratch(final)
    scratch.unlink()
    os.close(handle)
    return final


def _may_replace(path: Path) -> bool:
    """False for another user's file in a folder with the sticky bit (/tmp)."""
    folder, me = path.parent.stat(), os.geteuid()
    return not folder.st_mode & stat.S_ISVTX or me in (0, folder.st_uid, path.stat().st_uid)


def _descriptor(path: Path) -> int | None:
    """N of /dev/fd/N and its like."""
    name = os.path.abspath(path)
    found = re.fullmatch(r"/(?:dev|proc/self)/fd/(\d+)", name)
    return _STANDARD.get(name) if found is None else int(found[1])


def is_special(path: Path) -> bool:
    """Paths that are written in place: a device, a pipe, an open descriptor; or a link to such."""
    is_other = path.exists() and not path.is_file() and not path.is_dir()
    return is_other or _descriptor(path) is not None


class replacing:
    """A file beside `path` that takes its name when the block ends without an exception, with the
    mode of what it replaces. What a link leads to is replaced, not the link."""

    def __init__(self, path: Path, mode: str) -> None:
        self._is_special = is_special(path)
        self._path = path if self._is_special else path.resolve()
        self._mode = mode

    def __enter__(self) -> IO[Any]:
        handle = self._open_special() if self._is_special else self._open_scratch()
        is_text = "b" not in self._mode
        self._file: IO[Any] = os.fdopen(
            handle,
            self._mode,
            encoding="utf-8" if is_text else None,
            newline="" if is_text else None,
        )
        return self._file

    def _open_special(self) -> int:
        descriptor = _descriptor(self._path)
        if descriptor is None:
            return os.open(self._path, os.O_WRONLY)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        return os.dup(descriptor)

    def _open_scratch(self) -> int:
        self._scratch, handle = open_scratch(self._path)
        self._lock = os.dup(handle)  # held until the file has its name
        return handle

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        try:
            self._finish(kind is None)
        except OSError as late:
            self._tell(late)
            raise
        finally:
            self._tell(error)

    def _tell(self, error: BaseException | None) -> None:
        """Which file it was, where the system does not say."""
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(self._path)

    def _finish(self, is_whole: bool) -> None:
        is_named = self._is_special
        try:
            self._file.close()  # writes what is buffered: a full disk may show only here
            if is_whole and not self._is_special:
                exists = self._path.exists()
                mode = self._path.stat().st_mode & 0o777 if exists else created_mode(0o666)
                self._scratch.chmod(mode)
                self._scratch.replace(self._path)
                is_named = True
        finally:
            try:
                if not is_named:
                    self._leave()
            finally:
                if not self._is_special:
                    os.close(self._lock)

    def _leave(self) -> None:
        """What becomes of the file where it does not get its name."""
        self._scratch.unlink(missing_ok=True)


class keeping(replacing):
    """The same for bytes that are written bit by bit and are worth having if the rest never comes:
    what was appended is kept as NAME.partial.ENDING, a name that no file has yet."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "wb")
        self.kept: Path | None = None  # set by `close`
        self._num_bytes = 0

    def append(self, content: bytes) -> None:
        """All of it, or nothing that is kept. Raises OSError."""
        try:
            self._file.write(content)
            self._file.flush()
        except OSError as error:
            self._tell(error)
            raise
        self._num_bytes += len(content)

    def go_back(self) -> None:
        """Forget what an `append` wrote that an exception cut short, so that the next follows the
        last whole one. Raises OSError."""
        if not self._is_special:
            self._file.seek(self._num_bytes)

    def drop(self) -> None:
        """Close it and keep nothing. Never raises OSError."""
        self._num_bytes = 0
        with suppress(OSError):
            self.close(is_whole=False)

    def close(self, is_whole: bool) -> None:
        """Give it its name, or one that says that it is not whole. Raises OSError."""
        try:
            self._finish(is_whole)
        except OSError as error:
            self._tell(error)
            raise

    def _leave(self) -> None:
        if not self._num_bytes:
            super()._leave()
            return
        os.truncate(self._scratch, self._num_bytes)
        self._scratch.chmod(created_mode(0o666))
        kept = self._partial_name()
        self._scratch.replace(kept)
        self.kept = kept

    def _partial_name(self) -> Path:
        """Taken by making it, so that no other process takes it as well."""
        for number in count(1):
            more = f".{number}" if number > 1 else ""
            path = self._path.with_name(f"{self._path.stem}.partial{more}{self._path.suffix}")
            with suppress(FileExistsError):
                os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
                return path
        raise AssertionError("numbers do not end")
