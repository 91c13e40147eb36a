"""Runs of several ranks as processes, and what is asked of their end."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

PROMPT = ("--input-text", "def read_lines(path):")
# Half a minute on two ranks: longer than any test takes to find a rank and do something to it.
ENDLESS = (*PROMPT, "--max-output-len", "900", "--end-id", "4000")
ENDLESS += ("--num-return-sequences", "32", "--temperature", "1")
SHORT = (*PROMPT, "--max-output-len", "8")
LIMIT_S = 60.0  # of a test's waiting, for processes that import torch beside others
# Of the end of a run that generates, once something has happened to it: a few seconds, more where
# others have the cores. Less than RANK_WAITS_S, in which a rank that is silent would be noticed.
END_S = 25.0


@dataclass
class Ranks:
    """Starts processes and knows which are there."""

    engine: Path
    program: list[str]
    processes: list[subprocess.Popen[str]]

    def start(self, *words: object, **environment: str) -> subprocess.Popen[str]:
        """`llmctl run` in a process of its own."""
        return self.launch([sys.executable, "-m", "llmctl.cli.entry"], words, environment)

    def launch(
        self, program: list[str], words: tuple[object, ...], environment: dict[str, str]
    ) -> subprocess.Popen[str]:
        command = [*program, "run", "--engine-dir", str(self.engine), *map(str, words)]
        process = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.processes.append(process)
        return process

    def follower(self, leader: subprocess.Popen[str]) -> int:
        """The process id of rank 1, once the run generates."""
        assert leader.stderr is not None
        for line in leader.stderr:
            if line.startswith("KV cache"):
                return children(leader.pid)[0]
        raise AssertionError(f"the run ended with {leader.wait()}")


def children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(word) for word in text.split()]


def is_there(pid: int) -> bool:
    """Whether a process runs: a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def end_of(process: subprocess.Popen[str], within_s: float = LIMIT_S) -> tuple[int, str]:
    """(exit code, stderr) of a run that ends in time."""
    _, err = process.communicate(timeout=within_s)
    return process.returncode, err


def require_one_error(err: str, said: str) -> None:
    errors = [line for line in err.splitlines() if line.startswith("error[")]
    assert len(errors) == 1 and said in errors[0], err
    assert "Traceback" not in err, err


def require_gone(pid: int) -> None:
    end = time.monotonic() + END_S
    while is_there(pid) and time.monotonic() < end:
        time.sleep(0.02)
    assert not is_there(pid)


JOB = {"WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": f"test-{os.getpid()}"}
