"""The setuptools command that `pip install` runs to compile the CPU kernels."""

from __future__ import annotations

import os
import runpy
import shutil
from pathlib import Path

from setuptools import Extension
from setuptools.command.build_ext import build_ext

# by path: the package is not importable while it is being built
_COMPILE = runpy.run_path(str(Path(__file__).with_name("compile.py")))


class BuildKernels(build_ext):
    """`build_ext` for a library that is not a Python extension module."""

    def build_extension(self, ext: Extension) -> None:
        """Compile the library where setuptools expects this extension; or copy what a script that
        says so has compiled in place just before, beside its downloads."""
        target = Path(self.get_ext_fullpath(ext.name))
        if not os.environ.get("LLMCTL_KERNELS_COMPILED"):
            _COMPILE["compile_library"](target)
            return
        compiled = Path(__file__).with_name(_COMPILE["LIBRARY"])
        if target.resolve() != compiled.resolve():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(compiled, target)

    def get_source_files(self) -> list[str]:
        """What an sdist has of the library: every file, where the extension names one."""
        root: Path = _COMPILE["PLUGINS"].parent
        return [path.relative_to(root).as_posix() for path in _COMPILE["source_files"]()]

    def get_ext_filename(self, fullname: str) -> str:
        """The library's path inside the package tree, without Python's ABI suffix."""
        return os.path.join(*fullname.split(".")[:-1], _COMPILE["LIBRARY"])
