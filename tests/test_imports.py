"""Imports point one way: cli -> quantize, builder, runtime -> plugins -> errors, publish."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest

from llmctl.quantize.calibration import DEMO_TEXT

STAGES = {"quantize", "builder", "runtime"}
ROOT = {"errors", "publish"}
ALLOWED = {
    "cli": STAGES | {"plugins", "cli"} | ROOT,
    "quantize": {"quantize", "plugins"} | ROOT,
    "builder": {"builder", "plugins"} | ROOT,
    "runtime": {"runtime", "plugins"} | ROOT,
    "plugins": {"plugins"} | ROOT,
    "__init__": {"runtime"},
    "errors": set(),
    "publish": {"errors"},
}
# A stage may read another stage's artefact through the module that defines it, and no other.
ARTEFACTS = {
    ("builder", "llmctl.quantize.format"),
    ("builder", "llmctl.quantize.checkpoint"),
    ("runtime", "llmctl.builder.engine_format"),
    ("runtime", "llmctl.builder.signature"),
    ("runtime", "llmctl.builder.signing_keys"),
}


def source_files(repository: Path) -> list[Path]:
    folders = [name for name in ALLOWED if (repository / name).is_dir()]
    files = [path for name in folders for path in sorted((repository / name).rglob("*.py"))]
    return [*files, *(repository / f"{name}.py" for name in ("__init__", "errors", "publish"))]


def imported_modules(path: Path) -> list[str]:
    """Every llmctl module a file imports, `from llmctl.x import y` counted as llmctl.x."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write llmctl.<folder>.<module>"
            if node.module in ("llmctl", *(f"llmctl.{folder}" for folder in ALLOWED)):
                found += [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                found.append(node.module or "")
    return [name for name in found if name.split(".")[0] == "llmctl"]


def test_every_import_points_down_the_stack(repository: Path) -> None:
    wrong = []
    for path in source_files(repository):
        folder = path.relative_to(repository).parts[0].removesuffix(".py")
        for module in imported_modules(path):
            is_artefact = any(
                folder == stage and (module == name or module.startswith(name + "."))
                for stage, name in ARTEFACTS
            )
            if module.split(".")[1] not in ALLOWED[folder] and not is_artefact:
                wrong.append(f"{path.relative_to(repository)} imports {module}")
    assert not wrong, "\n".join(wrong)


def test_the_import_check_sees_a_wrong_import(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text("from llmctl.runtime import request\nimport llmctl.cli.main\n")
    assert imported_modules(tmp_path / "x.py") == ["llmctl.runtime.request", "llmctl.cli.main"]


def test_every_package_folder_is_listed_for_installation(repository: Path) -> None:
    project = tomllib.loads((repository / "pyproject.toml").read_text())
    listed = set(project["tool"]["setuptools"]["packages"])
    folders = ["cli", "quantize", "builder", "runtime", "plugins"]
    on_disk = {"llmctl"} | {
        "llmctl." + ".".join(init.parent.relative_to(repository).parts)
        for folder in folders
        for init in (repository / folder).rglob("__init__.py")
    }
    assert listed == on_disk


@pytest.mark.parametrize("name", ["cli", "quantize", "builder", "runtime", "plugins"])
def test_every_folder_with_modules_is_a_package(repository: Path, name: str) -> None:
    for module in (repository / name).rglob("*.py"):
        assert (module.parent / "__init__.py").exists(), module


def test_every_file_that_is_installed_lies_in_a_package(repository: Path) -> None:
    project = tomllib.loads((repository / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["*"]
    folders = [repository / name for name in ("quantize", "plugins")]
    files = [path for folder in folders for p in patterns for path in folder.rglob(p)]
    assert len(files) > 40 and DEMO_TEXT.name in {path.name for path in files}
    for path in files:
        assert (path.parent / "__init__.py").exists(), f"{path} would not be installed"


def test_an_sdist_has_every_file_of_the_cpu_library(repository: Path) -> None:
    dist = pytest.importorskip("setuptools.dist")
    from llmctl.plugins.backends.cpu.setuptools_command import BuildKernels

    listed = BuildKernels(dist.Distribution()).get_source_files()
    files = [path for kind in ("h", "cpp") for path in (repository / "plugins").rglob(f"*.{kind}")]
    assert sorted(listed) == sorted(str(path.relative_to(repository)) for path in files)
