"""Names for exceptions of Python and of libraries that are no bugs: the machine lacks something."""

from __future__ import annotations

import errno
import re
from typing import NamedTuple

from llmctl.errors import MissingPackage, OutOfDisk, OutOfMemory
from llmctl.publish import SPACE_FIXES


class Failure(NamedTuple):
    """What is reported."""

    name: str
    message: str
    fix: str
    exit_code: int


def name_failure(error: Exception) -> Failure | None:
    """Full disk, no memory, no package, file access; None for a bug."""
    if isinstance(error, OSError) and error.errno in SPACE_FIXES:
        fix = f"{SPACE_FIXES[error.errno]} or choose another file system"
        return Failure(OutOfDisk.__name__, str(error), fix, OutOfDisk.exit_code)
    if _is_out_of_memory(error):
        asked = re.search(r"tried to allocate (\d+) bytes", str(error))  # PyTorch's
        message = f"the machine has no {int(asked[1]) / 1e9:.3g} GB left" if asked else str(error)
        message = message or "the machine has too little memory"
        fix = "free memory, or lower the batch size, the tokens per step or the KV cache"
        return Failure(OutOfMemory.__name__, message, fix, OutOfMemory.exit_code)
    if (found := _unloaded(error)) is not None:
        return Failure(MissingPackage.__name__, *found, MissingPackage.exit_code)
    if isinstance(error, OSError) and error.filename is not None:
        fix = "see that this path exists and that you may use it"
        return Failure(type(error).__name__, str(error), fix, 1)
    return None


def _unloaded(error: Exception) -> tuple[str, str] | None:
    """Message and fix where a package of others is absent or does not load."""
    package = (error.name or "").partition(".")[0] if isinstance(error, ImportError) else ""
    if package not in ("", "llmctl"):
        if isinstance(error, ModuleNotFoundError):
            what = f"the Python package {package} is not installed, which this command needs"
            return what, f"pip install --upgrade 'llmctl' {package}"
        what = f"the Python package {package} is installed and cannot be imported: {error}"
        return what, f"pip install --force-reinstall 'llmctl' {package}"
    # Of ctypes, by which packages load libraries of their own and of the system.
    is_loading = isinstance(error, OSError | ImportError) and getattr(error, "errno", None) is None
    if is_loading and "shared object" in str(error):
        return f"a library that a Python package needs cannot be loaded: {error}", (
            "install what has this library, or that package again"
        )
    return None


def _is_out_of_memory(error: Exception) -> bool:
    """Python's and numpy's, the system's, PyTorch's of the host and of a GPU, the loader's."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    text = str(error)
    if isinstance(error, ImportError | OSError) and "failed to map segment" in text:
        return "not permitted" not in text  # as of a file system that runs nothing
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return "can't allocate memory" in text
