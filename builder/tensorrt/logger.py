"""TensorRT's messages. A process keeps the first logger it is given, so there is one a package."""

from __future__ import annotations

from typing import Any

_loggers: dict[str, Any] = {}  # by the package's name


def shared_logger(trt: Any) -> Any:
    """The logger of a package; `lines` is what it was told, as (severity, message)."""
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
