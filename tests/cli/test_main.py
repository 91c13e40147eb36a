"""Exit codes, error texts, option names, start-up."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from llmctl import errors
from llmctl.cli import app, main
from llmctl.errors import LlmctlError, OutputExists

ERROR_CLASSES = sorted(
    (
        item
        for item in vars(errors).values()
        if isinstance(item, type) and issubclass(item, LlmctlError)
    ),
    key=lambda item: item.__name__,
)


def replace_run(monkeypatch: pytest.MonkeyPatch, command: Callable[[], None]) -> None:
    """Let `llmctl run` import this command, which has no options."""
    module = ModuleType("replaced_run")
    vars(module)["command"] = command
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(app.COMMANDS, "run", (module.__name__, "command", "Replaced."))


@pytest.fixture
def command_that_raises(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], None]:
    """Replace `llmctl run` by a command without options that raises."""

    def install(error: BaseException) -> None:
        def command() -> None:
            raise error

        replace_run(monkeypatch, command)

    return install


@pytest.mark.parametrize("kind", ERROR_CLASSES, ids=lambda kind: kind.__name__)
def test_every_error_class_prints_its_name_and_exits_with_its_code(
    kind, llmctl, command_that_raises
):
    error = kind("there") if kind is OutputExists else kind("found 1, wanted 2", fix="do this")
    command_that_raises(error)
    done = llmctl("run")
    assert done.code == kind.exit_code in (1, 2, 3, 4)
    assert done.err == f"error[{kind.__name__}]: {error}\nfix: {error.fix}\n"
    assert done.out == ""


def test_an_error_without_a_fix_prints_one_line(llmctl, command_that_raises):
    command_that_raises(errors.BadLogits("NaN"))
    assert llmctl("run").err == "error[BadLogits]: NaN\n"


def test_json_errors_are_one_line_on_stdout(llmctl, tmp_path: Path):
    missing = tmp_path / "none"
    done = llmctl("run", "--engine_dir", missing, "--max_output_len", "4", "--json")
    assert done.code == 1 and done.err == "" and done.out.count("\n") == 1
    error = json.loads(done.out)["error"]
    assert error["name"] == "EngineNotFound" and error["exit_code"] == 1
    assert str(missing) in error["message"] and error["fix"]


def test_json_covers_usage_errors(llmctl):
    done = llmctl("run", "--json")
    error = json.loads(done.out)["error"]
    assert (done.code, error["name"], error["exit_code"]) == (2, "Usage", 2)
    assert "--engine-dir" in error["message"]


@pytest.mark.parametrize(
    "argv, words",
    [
        (["fly"], "No such command"),
        (["run", "--engine-dir", "x"], "--max-output-len"),
        (["run", "--engine-dir", "x", "--max-output-len", "many"], "--max-output-len"),
        (["run", "--no-such-option"], "--no-such-option"),
        (["run", "--engine-dir", "x", "--max-output-len", "1", "stray"], "stray"),
    ],
)
def test_usage_errors_exit_with_2(llmctl, argv, words):
    done = llmctl(*argv)
    assert done.code == 2 and words in done.err and "--help" in done.err
    assert done.err.startswith("error[Usage]: ") and done.out == ""


@pytest.mark.parametrize("option", ["--lora_dir", "--lora-dir", "--medusa_choices=[[0]]"])
def test_options_of_run_py_that_do_not_apply_are_refused_with_a_reason(llmctl, option):
    done = llmctl("run", "--engine_dir", "x", "--max_output_len", "1", option, "y")
    assert done.code == 2
    assert done.err.startswith("error[Unsupported]: " + option.split("=")[0].replace("_", "-"))
    assert "not available" in done.err


def test_no_option_is_both_refused_and_defined(llmctl):
    from llmctl.cli.refused import _REASONS

    defined = set(re.findall(r"--([a-z-]+)", llmctl("run", "--help-all").out))
    assert defined and not defined & set(_REASONS)


def test_an_unknown_exception_is_a_bug_with_a_saved_traceback(llmctl, command_that_raises):
    command_that_raises(ZeroDivisionError("oh"))
    done = llmctl("run")
    assert done.code == 70 and done.err.startswith("error[Bug]: ZeroDivisionError: oh")
    path = Path(re.search(r"traceback in (\S+)\)", done.err)[1])
    try:
        assert "raise error" in path.read_text() and "ZeroDivisionError: oh" in path.read_text()
    finally:
        path.unlink()


@pytest.mark.parametrize(
    "error, code, name",
    [
        (OSError(errno.ENOSPC, "No space left on device"), 3, "OutOfDisk"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), 3, "OutOfDisk"),
        (OSError(errno.EFBIG, "File too large"), 3, "OutOfDisk"),
        (MemoryError(), 3, "OutOfMemory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 3, "OutOfMemory"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), 3, "OutOfMemory"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), 3, "OutOfMemory"),
        (PermissionError(errno.EACCES, "Permission denied", "/x"), 1, "PermissionError"),
    ],
)
def test_failures_of_the_machine_have_names(llmctl, command_that_raises, error, code, name):
    command_that_raises(error)
    done = llmctl("run")
    assert done.code == code and done.err.startswith(f"error[{name}]: ") and "\nfix: " in done.err


@pytest.mark.parametrize(
    "words, path",
    [
        ("", "llmctl"),
        ("nothing --x", "llmctl"),
        ("run --engine-dir latency", "llmctl run"),
        ("bench latency --engine-dir throughput", "llmctl bench latency"),
        ("dataset --random_seed text token-norm-dist", "llmctl dataset token-norm-dist"),
        ("dataset --output=text --random-seed 3 text", "llmctl dataset text"),
        ("dataset --output text", "llmctl dataset"),
    ],
)
def test_the_command_of_a_line_is_not_an_option_s_value(words, path):
    assert app.command_path(words.split()) == path


def test_memory_that_is_missing_is_named_in_gigabytes(llmctl, command_that_raises):
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**60, dtype=torch.uint8)
    command_that_raises(raised.value)
    assert llmctl("run").err.startswith("error[OutOfMemory]: the machine has no 1.15e+09 GB left\n")


@pytest.mark.parametrize("error, code", [(KeyboardInterrupt(), 130), (main.Terminated(), 143)])
def test_signals_have_their_exit_codes(llmctl, command_that_raises, error, code):
    command_that_raises(error)
    done = llmctl("run")
    assert done.code == code and done.out == "" and "Traceback" not in done.err


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_runs_clean_ups_and_its_handler_is_put_back(llmctl, monkeypatch, number, code):
    cleaned = []

    def command() -> None:
        try:
            os.kill(os.getpid(), number)
        finally:
            cleaned.append(True)

    replace_run(monkeypatch, command)
    before = signal.getsignal(number)
    assert llmctl("run").code == code and cleaned == [True]
    assert signal.getsignal(number) is before


# A command that is signalled inside a destructor, or twice, the second time in its clean-up.
_SIGNALLED = """
import os, signal, sys, time
from types import ModuleType
from llmctl.cli import app, main

class Dropped:
    def __del__(self):
        os.kill(os.getpid(), {number})
        time.sleep(0)

def command():
    if {is_dropped}:
        Dropped()
        time.sleep(30)
    try:
        os.kill(os.getpid(), {number})
        time.sleep(30)
    finally:
        os.kill(os.getpid(), {number})
        time.sleep(0.1)
        print("cleaned", flush=True)

module = ModuleType("command")
module.command = command
sys.modules["command"] = module
app.COMMANDS["run"] = ("command", "command", "")
sys.argv = ["llmctl", "run"]
main.main()
"""


@pytest.mark.parametrize("is_dropped", [False, True], ids=["twice", "in a destructor"])
@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_are_neither_lost_nor_cut_clean_ups_short(number, code, is_dropped):
    text = _SIGNALLED.format(number=int(number), is_dropped=is_dropped)
    words = [sys.executable, "-c", text]
    done = subprocess.run(words, capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == code and "Traceback" not in done.stderr, done.stderr
    assert done.stdout == ("" if is_dropped else "cleaned\n")


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_failure_that_a_dropped_signal_caused_is_no_bug(llmctl, monkeypatch, number, code):
    def command() -> None:
        try:
            os.kill(os.getpid(), number)
            time.sleep(30)
        except BaseException:  # as an import inside native code does
            raise AttributeError("half imported") from None

    replace_run(monkeypatch, command)
    done = llmctl("run")
    assert done.code == code and done.err == "llmctl: interrupted\n"


def test_a_bug_report_takes_any_command_line(llmctl, command_that_raises, monkeypatch):
    command_that_raises(ZeroDivisionError("oh"))
    monkeypatch.setattr(sys, "argv", ["llmctl", "run", "a\udcff"])
    done = llmctl("run")
    path = Path(re.search(r"traceback in (\S+)\)", done.err)[1])
    assert done.code == 70 and "a\\udcff" in path.read_text()
    path.unlink()


@pytest.mark.parametrize("closed", [1, 2])
def test_a_closed_stream_is_no_failure(program, closed):
    words = shlex.join([*program, "--help"]) + f" {closed}>&-"
    done = subprocess.run(words, shell=True, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stderr == ""
    assert ("Usage" in done.stdout) == (closed == 2)


def test_a_reader_that_has_gone_is_no_error_message(program):
    words = [*program, "run", "--help"]
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        done = subprocess.run(words, stdout=write_end, stderr=subprocess.PIPE, timeout=60)
    finally:
        os.close(write_end)
    assert done.returncode == 141 and done.stderr == b""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
def test_results_that_do_not_fit_the_disk_are_a_named_failure(program):
    with Path("/dev/full").open("w") as full:
        words = [*program, "run", "--help"]
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 3
    assert done.stderr.startswith("error[OutOfDisk]: ") and "Traceback" not in done.stderr


def test_version_names_the_program(llmctl):
    assert re.fullmatch(r"llmctl \d+\.\d+\.\d+\S*\n", llmctl("--version").out)


def test_options_without_a_command_are_a_usage_error(llmctl):
    done = llmctl("--json")
    assert done.code == 2 and json.loads(done.out)["error"]["name"] == "Usage"


def test_help_lists_the_commands(llmctl):
    done = llmctl("--help")
    assert done.code == 0 and done.err == ""
    listed = done.out.partition("Commands:\n")[2].partition("\n\n")[0]
    assert re.findall(r"^  ([a-z]+) ", listed, re.M) == list(app.COMMANDS)
    assert llmctl().out == done.out


def test_every_option_of_run_explains_itself(llmctl):
    text = llmctl("run", "--help-all").out
    for name in ("--engine-dir", "--draft-engine", "--verify-exact", "--ngram-config"):
        assert name in text  # never cut off by the width of the terminal


@pytest.mark.parametrize("argv", [[], ["run"], ["build"], ["quantize"]], ids=str)
def test_help_imports_nothing_heavy(argv):
    assert_imports_nothing_heavy(*argv, "--help")


def test_inspecting_an_engine_imports_nothing_heavy(engines):
    """Not even to predict its step, from what is known of the GPU that is named."""
    assert_imports_nothing_heavy("inspect", engines.target, "--read-bandwidth", "100")


def assert_imports_nothing_heavy(*argv: object) -> None:
    words = [sys.executable, "-X", "importtime", "-m", "llmctl.cli.entry", *map(str, argv)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    imported = {line.split("|")[2].strip() for line in done.stderr.splitlines() if "|" in line}
    assert "typer" in imported
    heavy = {"torch", "numpy", "transformers", "tokenizers", "safetensors", "modelopt", "jinja2"}
    assert not heavy & imported


def test_help_is_quick(program):
    def seconds() -> float:
        began = time.perf_counter()
        subprocess.run([*program, "--help"], stdout=subprocess.DEVNULL, check=True)
        return time.perf_counter() - began

    assert min(seconds() for _ in range(3)) < 0.5  # 0.06 s on an idle core; others may be busy
