"""Who may be a rank of a run: rank 0 meets processes that are not, here played by threads."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from llmctl.errors import RankFailure
from llmctl.runtime.kv_cache.attention_windows import WindowOptions
from llmctl.runtime.ranks import leader as leader_module
from llmctl.runtime.ranks.channel import Channel, connect
from llmctl.runtime.ranks.identity import identity
from llmctl.runtime.ranks.launch import World, address_of
from llmctl.runtime.ranks.leader import Leader
from llmctl.runtime.ranks.processes import RankOptions, start_rank

LIMIT_S = 20.0  # of what ends before
IN_VAIN_S = 0.3  # of waiting for who never comes
Others = Callable[[Callable[[], Channel]], None]
_numbers = count()


@pytest.fixture
def engines(tmp_path: Path) -> dict[str, Path]:
    """Folders of a target and a draft engine of which config.json alone is read."""
    for role in ("target", "draft"):
        (tmp_path / role).mkdir()
        (tmp_path / role / "config.json").write_text(f'"{role}"')
    return {role: tmp_path / role for role in ("target", "draft")}


@pytest.fixture
def meet(engines: Mapping[str, Path], tmp_path: Path) -> Iterator[Callable[..., list[Any]]]:
    """meet(others, size, limit_s): rank 0 waits for `size` ranks while others(join) plays them;
    what it raises, and what each channel was told last."""
    threads: list[threading.Thread] = []
    channels: list[Channel] = []

    def run(
        others: Others, size: int = 2, limit_s: float = LIMIT_S
    ) -> tuple[RankFailure, list[Channel]]:
        job = f"test-meeting-{tmp_path}-{next(_numbers)}"

        def join() -> Channel:
            channel = connect(address_of(job), 20)
            assert channel is not None
            channels.append(channel)
            return channel

        threads.append(threading.Thread(target=others, args=(join,)))
        threads[-1].start()
        options = RankOptions(size, engines, WindowOptions(), 1, limit_s)
        with pytest.raises(RankFailure) as raised:
            Leader(options, World("a test", 0, size, job))
        threads[-1].join()
        return raised.value, channels

    yield run
    for thread in threads:
        thread.join()
    for channel in channels:
        channel.close()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"size": 4}, "is one of 4 ranks; rank 0 is one of 2"),
        ({"rank": 7}, "is one too many; the engine has 2 ranks"),
        ({"version": "0.0.1"}, "runs llmctl 0.0.1; rank 0 runs"),
        ({"engines": {}}, "has no target engine; rank 0 has one"),
    ],
)
def test_a_rank_of_another_run_is_refused_and_told_why(
    meet: Callable[..., Any], engines: Mapping[str, Path], change: dict[str, Any], said: str
) -> None:
    error, (channel,) = meet(lambda join: join().send(identity(1, 2, engines) | change))
    assert said in str(error) and f"rank {change.get('rank', 1)} (process " in str(error)
    assert said in str(channel.receive(1))
    assert channel.receive(1) is None, "and left alone"


def test_another_draft_engine_is_another_run(
    meet: Callable[..., Any], engines: Mapping[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('"another"')
    others = {**engines, "draft": tmp_path}
    error, _ = meet(lambda join: join().send(identity(1, 2, others)))
    assert "rank 1 (process " in str(error)
    assert "has another draft engine than rank 0 (config.json differs)" in str(error)


def test_a_rank_that_comes_twice_is_named(
    meet: Callable[..., Any], engines: Mapping[str, Path]
) -> None:
    def twice(join: Callable[[], Channel]) -> None:
        for _ in range(2):
            join().send(identity(1, 3, engines))

    error, _ = meet(twice, size=3)
    assert "rank 1 (process " in str(error) and "comes a second time, after process" in str(error)


NONSENSE = {
    "nothing": b"",
    "no JSON": b"nonsense\n",
    "no object": b"[]\n",
    "nested too deeply": b"[" * 60_000 + b"\n",
    "a rank that is no number": b'{"rank": "1"}\n',
    "too long": b"x" * 100_000,
}


@pytest.mark.parametrize("text", list(NONSENSE.values()), ids=list(NONSENSE))
def test_whoever_talks_nonsense_is_no_rank(meet: Callable[..., Any], text: bytes) -> None:
    """Rank 0 goes on waiting for the one that is missing, and names it."""

    def talk(join: Callable[[], Channel]) -> None:
        channel = join()
        with contextlib.suppress(OSError):  # rank 0 may have heard enough
            channel.connection.sendall(text)
        channel.close()

    error, _ = meet(talk, limit_s=IN_VAIN_S)
    assert str(error) == "rank 1 has not come within 0.3 s; 1 of 2 ranks are here"


def test_whoever_says_nothing_does_not_keep_rank_0_waiting(meet: Callable[..., Any]) -> None:
    start = time.monotonic()
    error, _ = meet(lambda join: join(), limit_s=IN_VAIN_S)
    assert "rank 1 has not come within 0.3 s" in str(error)
    assert time.monotonic() - start < LIMIT_S


@pytest.mark.parametrize(
    ("program", "limit_s", "said"),
    [
        (
            "import time; time.sleep(600)",
            IN_VAIN_S,
            "rank 1 has not come within 0.3 s; 1 of 2 ranks are here",
        ),
        ("raise SystemExit(3)", LIMIT_S, "rank 1 ended with exit code 3 before it was ready"),
        (
            "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
            LIMIT_S,
            "rank 1 was killed by SIGSEGV before it was ready",
        ),
    ],
)
def test_a_started_rank_that_never_comes_is_ended(
    engines: Mapping[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    program: str,
    limit_s: float,
    said: str,
) -> None:
    """Here another program in its place."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*given: Any) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen([sys.executable, "-S", "-c", program]))
        return started[0]

    assert start_rank is leader_module.start_rank
    monkeypatch.setattr(leader_module, "start_rank", start)
    monkeypatch.setattr(leader_module, "_START_S", limit_s)
    monkeypatch.setattr("llmctl.runtime.ranks.processes.END_S", 0.2)
    with pytest.raises(RankFailure) as raised:
        Leader(RankOptions(2, engines, WindowOptions(), 1, limit_s), None)
    assert str(raised.value) == said
    assert started[0].returncode is not None, "nothing stays behind"
