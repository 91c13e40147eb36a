"""Signals, closed streams and start-up of the program."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.main import replace_run

from llmctl.cli import app
from llmctl.cli.signals import Terminated


@pytest.mark.parametrize("error, code", [(KeyboardInterrupt(), 130), (Terminated(), 143)])
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
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
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
    done = subprocess.run(words, shell=True, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stderr == ""
    assert ("Usage" in done.stdout) == (closed == 2)


def test_a_reader_that_has_gone_is_no_error_message(program):
    words = [*program, "run", "--help"]
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        done = subprocess.run(words, stdout=write_end, stderr=subprocess.PIPE, timeout=120)
    finally:
        os.close(write_end)
    assert done.returncode == 141 and done.stderr == b""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
def test_results_that_do_not_fit_the_disk_are_a_named_failure(program):
    with Path("/dev/full").open("w") as full:
        words = [*program, "run", "--help"]
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
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
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)
    imported = {line.split("|")[2].strip() for line in done.stderr.splitlines() if "|" in line}
    assert "typer" in imported
    heavy = {"torch", "numpy", "transformers", "tokenizers", "safetensors", "modelopt", "jinja2"}
    assert not heavy & imported


def test_help_is_quick(program):
    def seconds() -> float:
        """Of a processor: how long others keep it waiting says nothing."""
        with subprocess.Popen([*program, "--help"], stdout=subprocess.DEVNULL) as process:
            _, status, used = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == 0
        return used.ru_utime + used.ru_stime

    assert min(seconds() for _ in range(3)) < 0.5  # 0.06 s; a core may be shared
