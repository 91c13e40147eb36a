"""Programs for developers; run from the repository's root: `python -m scripts.<folder>.<name>`.

Where a package or a GPU is missing they end as `llmctl` does, with a named error and exit code 3.
"""

from __future__ import annotations

import sys
from types import TracebackType


def _end(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """sys.excepthook of a script."""
    name, fix = "", ""
    if isinstance(error, ModuleNotFoundError) and error.name is not None:
        package = error.name.partition(".")[0]
        if package == "llmctl":
            fix = "pip install -e '.[quantize,cuda]', in the repository's root"
        elif package not in ("scripts", "support"):
            fix = f"pip install {package}"
        if fix:
            name, message = "MissingPackage", f"the Python package {package} is not installed"
    elif isinstance(error, (AssertionError, RuntimeError)) and _lacks_gpu(str(error)):
        name, message = "NoDevice", f"this script needs a GPU: {error}".partition(".")[0]
        fix = "run it where there is an NVIDIA GPU, with a CUDA build of PyTorch"
    elif hasattr(error, "fix") and hasattr(error, "name"):  # of llmctl/errors.py
        name, message, fix = error.name, str(error), error.fix
    if not name:
        sys.__excepthook__(kind, error, traceback)
        return
    print(f"error[{name}]: {message}", *[f"fix: {fix}"] * bool(fix), sep="\n", file=sys.stderr)
    sys.exit(getattr(error, "exit_code", 3))


def _lacks_gpu(message: str) -> bool:
    """Whether PyTorch says so."""
    return "Torch not compiled with CUDA" in message or "no NVIDIA driver" in message


if sys.argv[:1] == ["-m"]:  # what Python puts there while it looks for the module to run
    sys.excepthook = _end
