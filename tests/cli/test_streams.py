"""Commands whose stderr takes nothing, and results that outlive a full disk."""

from __future__ import annotations

import errno
import fcntl
import io
import json
import os
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from llmctl.cli.bench import publish
from llmctl.cli.main import execute
from llmctl.cli.output_files import keeping, replacing

FULL = Path("/dev/full")
needs_full = pytest.mark.skipif(not FULL.exists(), reason="the system has no /dev/full")
PROMPT = ("--input-ids", "5", "6", "7", "--max-output-len", 3)


@needs_full
def test_a_stderr_that_takes_nothing_changes_no_result(program, engines, run_process):
    run = ["run", "--engine-dir", engines.target, "--input-text", "a", "--max-output-len", 3]
    heard = run_process(*run)
    assert heard.returncode == 0 and heard.stdout and heard.stderr
    for words, code in ((run, 0), (["run", "--engine-dir", "nowhere", "--input-text", "a"], 2)):
        with FULL.open("w") as full:
            line = [*program, *map(str, words)]
            done = subprocess.run(line, stdout=subprocess.PIPE, stderr=full, text=True, timeout=120)
        assert done.returncode == code
        assert done.stdout == (heard.stdout if code == 0 else "")


def wait_for_full_pipe(reads: int, pid: int) -> None:
    """Until nothing more fits, and who writes waits, or has given up."""
    size, until = fcntl.fcntl(reads, fcntl.F_GETPIPE_SZ), time.monotonic() + 60
    while True:
        (held,) = struct.unpack("i", fcntl.ioctl(reads, termios.FIONREAD, b"1234"))
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        if state == "Z" or (held > size - 4096 and state == "S"):  # a page is left at most
            return
        assert time.monotonic() < until, f"{held} of {size} bytes came"
        time.sleep(0.005)


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_a_pipe_that_does_not_block_loses_nothing(name):
    """As a parent process leaves it that shares it: run printed 50 of 183 kB, with exit code 0."""
    program = (
        "import sys; from llmctl.cli.streams import open_streams; open_streams(); "
        f"[print(i, 'x' * 999, file=sys.{name}) for i in range(300)]; sys.{name}.flush()"
    )
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    with (
        open(reads) as pipe,
        subprocess.Popen([sys.executable, "-c", program], **{name: writes}) as process,
    ):
        os.close(writes)
        wait_for_full_pipe(reads, process.pid)
        assert [line.split()[0] for line in pipe] == [str(i) for i in range(300)]


@needs_full
def test_the_file_that_did_not_fit_is_named():
    with pytest.raises(OSError, match="/dev/full") as caught, replacing(FULL, "w") as file:
        file.write("a")
    assert caught.value.errno == errno.ENOSPC


@needs_full
def test_a_network_that_does_not_fit_leaves_no_engine(llmctl, engines, tmp_path):
    build = ("build", "--checkpoint-dir", engines.target_checkpoint, "--output-dir", tmp_path / "e")
    done = llmctl(*build, "--visualize-network", FULL)
    assert done.code == 3 and "error[OutOfDisk]" in done.err and str(FULL) in done.err
    assert not list(tmp_path.iterdir())


def test_an_engine_that_cannot_be_written_is_named_and_not_its_network(
    llmctl, engines, tmp_path, monkeypatch
):
    def broken(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("llmctl.builder.build.write_engine", broken)
    build = ("build", "--checkpoint-dir", engines.target_checkpoint, "--output-dir", tmp_path / "e")
    done = llmctl(*build, "--visualize-network", tmp_path / "network")
    assert done.code == 1 and f"{tmp_path / 'e'}'" in done.err and "network" not in done.err
    assert not list(tmp_path.iterdir())


def test_the_file_that_was_written_when_the_disk_ran_full_is_named(tmp_path):
    with pytest.raises(OSError, match="out.csv"), replacing(tmp_path / "out.csv", "w"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert not list(tmp_path.iterdir())


def full_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_generated_text_is_printed_where_its_file_does_not_fit(
    llmctl, engines, tmp_path, monkeypatch
):
    line = ["run", "--engine-dir", engines.target, "--input-text", "a", "--max-output-len", 3]
    wanted = llmctl(*line)
    monkeypatch.setattr(keeping, "append", full_disk)
    done = llmctl(*line, "--output-csv", tmp_path / "out.csv")
    assert done.code == 3 and "error[OutOfDisk]" in done.err and done.out == wanted.out != ""
    done = llmctl(*line, "--output-csv", tmp_path / "out.csv", "--json")
    assert done.code == 3 and "error[OutOfDisk]" in done.err, "stdout stays one object"
    assert json.loads(done.out)["outputs"]


def test_a_report_is_printed_where_its_file_does_not_fit(llmctl, engines, tmp_path, monkeypatch):
    monkeypatch.setattr(publish, "raw_lines", full_disk)
    for option in ((), ("--json",)):
        done = llmctl(
            *("bench", "latency", "--engine-dir", engines.target, "--num-requests", 1),
            *("--target-input-len", 4, "--target-output-len", 2),
            *("--raw", tmp_path / "raw.jsonl", *option),
        )
        assert done.code == 3 and "error[OutOfDisk]" in done.err
        assert json.loads(done.out)["request_info"]["num_requests"] == 1


@pytest.mark.parametrize("encoding", ["latin-1", "ascii"])
@pytest.mark.parametrize(
    "words",
    [
        ("run", "--engine-dir", "LINK", "--input-text", "é🦙", "--max-output-len", "2"),
        ("run", "--engine-dir", "LINK-none", "--max-output-len", "2"),
        ("inspect", "LINK"),
        ("bench", "latency", "--engine-dir", "LINK", "--num-requests", "1", "--warmup", "0"),
    ],
    ids=lambda words: words[0],
)
def test_json_is_json_whatever_the_encoding_of_stdout(
    engines, tmp_path, monkeypatch, words, encoding
):
    """A character that the encoding has not was written as \\U0001f999, which JSON has not."""
    link = tmp_path / "é🦙"
    link.symlink_to(engines.target)
    line = [word.replace("LINK", str(link)) for word in words]
    written = io.BytesIO()
    stdout = io.TextIOWrapper(written, encoding)
    monkeypatch.setattr(sys, "stdout", stdout)
    execute([*line, "--json", *(["--target-output-len", "2"] if "bench" in words else [])])
    stdout.flush()
    assert "é🦙" in str(json.loads(written.getvalue()))
