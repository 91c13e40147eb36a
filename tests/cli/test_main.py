"""Exit codes, error texts, option names."""

from __future__ import annotations

import errno
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from llmctl import errors
from llmctl.cli import app
from llmctl.errors import LlmctlError, OutputExists

ERROR_CLASSES = sorted(
    (
        item
        for item in vars(errors).values()
        if isinstance(item, type) and issubclass(item, LlmctlError)
    ),
    key=lambda item: item.__name__,
)


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
    assert error["message"] == f"{missing} does not exist" and error["fix"]


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
        (["bench"], "a command is missing: latency or throughput"),
        (["dataset", "--tokenizer", "x"], "ommand"),
        (["run", "--engine-dir", "x", "--max-output-len", "1", "stray"], "stray"),
        (["run", "--engine-dir", "", "--max-output-len", "1"], "'--engine-dir': the path is empty"),
        (["build", "--checkpoint-dir", "x", "--output-dir="], "'--output-dir': the path is empty"),
        (["inspect", ""], "the path is empty"),
    ],
)
def test_usage_errors_exit_with_2(llmctl, argv, words):
    done = llmctl(*argv)
    assert done.code == 2 and words in done.err and "--help" in done.err
    assert done.err.startswith("error[Usage]: ") and done.out == ""


def test_a_current_folder_that_was_removed_is_named(llmctl, tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    done = llmctl("doctor")
    assert done.code == 2 and "error[BadConfig]: the current folder has been removed" in done.err


@pytest.mark.parametrize(
    "options, words",
    [
        ("--max-output-len many", "'many'"),
        ("--max-output-len -3", "-3"),
        ("--max-output-len 1 --max-attention-window-size 64 0", "0"),
        ("--max-output-len 1 --log-level loud", "--log-level': 'loud' is not one of"),
        ("--max-output-len", "see: llmctl run --help"),
    ],
)
def test_usage_errors_name_the_value_and_the_command(llmctl, options, words):
    """What a parser's message leaves out depends on the version of typer."""
    done = llmctl("run", "--engine-dir", "x", *options.split())
    assert done.code == 2 and words in done.err


@pytest.mark.parametrize(
    "words, fix",
    [
        ("bench build", "llmctl build --checkpoint-dir"),  # trtllm-bench's
        ("dataset --tokenizer x dataset", "text --input-file FILE"),  # prepare_dataset.py's
        ("completion", "see: llmctl completion --help"),
    ],
)
def test_a_usage_error_is_two_lines_and_names_what_to_type(llmctl, words, fix):
    done = llmctl(*words.split())
    assert done.code == 2 and done.err.count("\n") == 2 and fix in done.err.split("\n")[1]


@pytest.mark.parametrize("option", ["--lora_dir", "--lora-dir", "--prompt_tasks=1"])
def test_options_of_run_py_that_do_not_apply_are_refused_with_a_reason(llmctl, option):
    done = llmctl("run", "--engine_dir", "x", "--max_output_len", "1", option, "y")
    assert done.code == 2
    assert done.err.startswith("error[Unsupported]: " + option.split("=")[0].replace("_", "-"))
    assert "not available" in done.err


@pytest.mark.parametrize(
    "command, option, words",
    [
        ("quantize", "--awq_block_size", "AWQ is not available"),
        ("quantize", "--medusa_model_dir", "--draft-model-dir"),
        ("build", "--max_lora_rank", "merge the adapter"),
        ("build", "--paged_kv_cache", "--kv-cache-type"),
        ("bench", "--workspace", "llmctl build"),
        ("bench latency", "--quantization", "llmctl quantize"),
        ("bench latency", "--no_weights_loading", "--load-format dummy"),
        ("bench throughput", "--trust_remote_code", "never run"),
        ("bench throughput", "--pp_size", "pipeline"),
        ("dataset", "--task-id", "LoRA"),
    ],
)
def test_options_of_other_commands_that_do_not_apply_are_refused_with_a_reason(
    llmctl, command, option, words
):
    done = llmctl(*command.split(), option, "1")
    assert done.code == 2 and words in done.err
    assert done.err.startswith(f"error[Unsupported]: {option.replace('_', '-')} is not available: ")


@pytest.mark.parametrize(
    "command", ["quantize", "build", "run", "bench latency", "bench throughput", "dataset text"]
)
def test_no_option_is_both_refused_and_defined(llmctl, command):
    from llmctl.cli.refused import REASONS

    name = command.split()[0]
    defined = set(re.findall(r"--([a-z-]+)", llmctl(*command.split(), "--help-all").out))
    assert defined and not defined & set(REASONS[name])


def test_the_package_runs_as_a_module(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "llmctl", "run"], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 2 and done.stderr.startswith("error[Usage]: Missing option")


@pytest.mark.parametrize(
    "error", [ZeroDivisionError("oh"), ImportError("oh"), ImportError("oh", name="llmctl.builder")]
)
def test_an_unknown_exception_is_a_bug_with_a_saved_traceback(llmctl, command_that_raises, error):
    command_that_raises(error)
    done = llmctl("run")
    kind = type(error).__name__
    assert done.code == 70 and done.err.startswith(f"error[Bug]: {kind}: oh")
    path = Path(re.search(r"traceback in (\S+)\)", done.err)[1])
    try:
        assert "raise error" in path.read_text() and f"{kind}: oh" in path.read_text()
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
        (ImportError("x.so: failed to map segment from shared object"), 3, "OutOfMemory"),
        (ImportError("x.so: undefined symbol: f", name="torch._C"), 3, "MissingPackage"),
        (ImportError("cannot import name 'f'", name="transformers"), 3, "MissingPackage"),
        (OSError("libgomp.so.1: cannot open shared object file: No such"), 3, "MissingPackage"),
        (OSError("a: shared object: failed to map segment: not permitted"), 3, "MissingPackage"),
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
