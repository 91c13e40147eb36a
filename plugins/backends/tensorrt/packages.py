"""The TensorRT packages of this process: which one a backend needs, and its log messages.

`tensorrt_rtx` and `tensorrt` have the same API. Features of only one of them or of some versions
are looked up by name.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from llmctl.errors import MissingPackage

PACKAGES = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}  # backend -> import name
INSTALL = {
    "tensorrt": "pip install 'llmctl[tensorrt]' --extra-index-url https://pypi.nvidia.com",
    "tensorrt-rtx": "pip install 'llmctl[tensorrt-rtx]'",
}
_SERIOUS = ("ERROR", "INTERNAL_ERROR")
_loggers: dict[str, Any] = {}  # by the package's name


def load_package(backend: str) -> Any:
    """The imported package of a backend. Raises MissingPackage, with the command to install."""
    name = PACKAGES[backend]
    found = ""
    try:
        package = import_module(name)
    except ImportError as error:
        found = f"cannot be imported: {error}"
    else:  # a folder of that name on the path imports, too
        if not hasattr(package, "Runtime"):
            found = f"is not NVIDIA's (it is {getattr(package, '__path__', '?')})"
    if found:
        raise MissingPackage(
            f"backend {backend!r} needs the package {name}, which {found}", fix=INSTALL[backend]
        )
    return package


def shared_logger(trt: Any) -> Any:
    """The logger of a package, of which a process keeps the first; `lines` is what it was told,
    as (severity, message)."""
    name = trt.__name__
    if name not in _loggers:

        class Logger(trt.ILogger):  # type: ignore[misc]  # neither package has types
            def __init__(self) -> None:
                trt.ILogger.__init__(self)
                self.lines: list[tuple[str, str]] = []

            def log(self, severity: Any, message: str) -> None:
                self.lines.append((str(severity).rpartition(".")[2], message))

        _loggers[name] = Logger()
    return _loggers[name]


def last_error(trt: Any) -> str:
    """The newest error that the package told its logger, for the end of a message."""
    lines = shared_logger(trt).lines
    words = [message for severity, message in lines if severity in _SERIOUS]
    return f": {words[-1]}" if words else ""
