"""Results of many prompts: handed on in order as they end, kept when the run is cut short."""

from __future__ import annotations

import errno
import json
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from support.run import write_results

from llmctl.cli.output_files import keeping
from llmctl.cli.run.generate import Row, generate
from llmctl.cli.run.results import Results
from llmctl.errors import BadLogits, ExecutorClosed, RankFailure
from llmctl.runtime.engines.cpu_engine import CpuEngine
from llmctl.runtime.request import FinishReason, Request
from llmctl.runtime.response import Response, Result


class Backwards:
    """Ends, of the requests that it has, the last; remembers how many it had."""

    def __init__(self):
        self.running, self.most, self.num = [], 0, 0

    def enqueue_requests(self, requests):
        ids = list(range(self.num, self.num + len(requests)))
        self.num += len(requests)
        self.running += ids
        self.most = max(self.most, len(self.running))
        return ids

    def await_responses(self):
        result = Result(0, (1, 2), True, True, FinishReason.LENGTH)
        return [Response(self.running.pop(), result=result)]


def make_rows(count, **fields):
    return [Row(i, f"p{i}", Request((1,), 4, **fields)) for i in range(count)]


def test_results_come_in_the_order_of_prompts_with_a_bound_in_flight():
    rows, taken, executor = make_rows(9), [], Backwards()
    rows[4].error = ValueError("refused")
    results = Results(
        rows, lambda row: taken.append((row.index, row.num_new_tokens)), keeps_tokens=False
    )
    most_held = []

    def hand_on():
        results.hand_on()
        most_held.append(sum(len(s.token_ids) > 0 for row in rows for s in row.sequences))

    generate(executor, rows, max_in_flight=3, hand_on=hand_on)
    assert executor.most == 3 and executor.num == 8
    assert taken == [(i, 0 if i == 4 else 2) for i in range(9)]
    assert most_held[-1] == 0, "what was handed on is not held"
    assert [row.num_new_tokens for row in rows].count(2) == 8


def test_rows_are_handed_on_before_the_last_ends():
    rows, taken, executor = make_rows(4), [], Backwards()
    results = Results(rows, lambda row: taken.append((row.index, executor.num)), keeps_tokens=True)
    generate(executor, rows, max_in_flight=1, hand_on=results.hand_on)
    assert taken == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert all(row.sequences[0].token_ids == [1, 2] for row in rows)


def test_the_highest_priority_is_sent_first():
    rows, ended = make_rows(3), []
    rows[2].request = Request((1,), 4, priority=0.9)
    generate(
        Backwards(),
        rows,
        lambda row, _: ended.append(row.index),
        max_in_flight=1,
    )
    assert ended == [2, 0, 1]


def test_requests_that_waited_when_the_executor_ended_have_its_error():
    class Ends(Backwards):
        def enqueue_requests(self, requests):
            if self.num:
                raise ExecutorClosed("ended") from RankFailure("rank 1 is gone", fix="")
            return super().enqueue_requests(requests)

    rows = make_rows(4)
    generate(Ends(), rows, max_in_flight=1)
    assert rows[0].error is None and isinstance(rows[1].error, RankFailure)
    assert all(row.error is not None for row in rows[1:])


def test_an_executor_that_stops_is_asked_for_nothing_more():
    class Stops(Backwards):
        def await_responses(self):
            return []

    rows, executor, taken = make_rows(4), Stops(), []
    rows[0].error = ValueError("refused")
    results = Results(rows, lambda row: taken.append(executor.num), keeps_tokens=True)
    generate(executor, rows, max_in_flight=1, hand_on=results.hand_on)
    assert executor.num == 1 and all(isinstance(r.error, ExecutorClosed) for r in rows[1:])
    assert taken == [0, 1, 1, 1], "what was refused is handed on before anything runs"


# ---- the program, cut short ----


@pytest.fixture
def many(engines, tmp_path) -> list[object]:
    """A run of 12 prompts with every kind of file."""
    prompts = tmp_path / "in.txt"
    prompts.write_text("".join(f"x = {i}\n" for i in range(12)))
    words: list[object] = ["run", "--engine-dir", engines.target, "--input-file", prompts]
    words += ["--max-output-len", 3, "--end-id", -1]
    for kind in ("csv", "npy", "jsonl"):
        words += [f"--output-{kind}", tmp_path / f"out.{kind}"]
    return [*words, "--scheduler-policy", "static_batch"]


@pytest.fixture
def failing(monkeypatch):
    """An engine that fails, as if its rank were lost or the process were told to end, when its
    first batch of 8 prompts has ended."""

    def install(fail):
        run, steps = CpuEngine.run, []

        def wrapped(self, step):
            steps.append(step)
            if len(steps) == 5:
                fail()
            return run(self, step)

        monkeypatch.setattr(CpuEngine, "run", wrapped)

    return install


def assert_kept(folder: Path, err: str, count: int) -> None:
    rows = [json.loads(line) for line in (folder / "out.partial.jsonl").read_text().splitlines()]
    assert [row["index"] for row in rows] == list(range(count))
    lines = (folder / "out.partial.csv").read_text().splitlines()
    ids = [list(map(int, line.split(","))) if line else [] for line in lines]
    assert ids == [row.get("token_ids", []) for row in rows]
    assert np.load(folder / "out.partial.npy").shape == (count, 3)
    for kind in ("csv", "npy", "jsonl"):
        kept = folder / f"out.partial.{kind}"
        assert f"it had {count} of 12 prompts; kept in {kept}" in err
        assert not (folder / f"out.{kind}").exists()
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_leaves_what_had_ended(llmctl, many, failing, tmp_path, number, code):
    def stop():
        time.sleep(0.3)  # the main thread writes what has ended
        os.kill(os.getpid(), number)
        time.sleep(0.3)  # and runs the handler

    failing(stop)
    done = llmctl(*many)
    assert done.code == code, done
    assert_kept(tmp_path, done.err, 8)
    assert done.out.count("Output [") == 8, "printed before the run was cut"


def test_a_lost_rank_leaves_what_had_ended(llmctl, many, failing, tmp_path):
    def lose():
        raise RankFailure("rank 1 is gone", fix="run again")

    failing(lose)
    done = llmctl(*many)
    assert done.code == 1 and done.err.count("error[RankFailure]: rank 1 is gone") == 1, done.err
    assert_kept(tmp_path, done.err, 8)


def test_a_request_that_fails_has_its_place_in_whole_files(llmctl, many, failing, tmp_path):
    def refuse():
        raise BadLogits("no number")

    failing(refuse)
    done = llmctl(*many)
    assert done.code == 1 and done.err.count("error[BadLogits]: Text ") == 4, done.err
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert ["error" in row for row in rows] == [False] * 8 + [True] * 4
    assert (tmp_path / "out.csv").read_text().endswith("\n\n\n\n")
    assert np.load(tmp_path / "out.npy").shape == (12, 3)
    assert len(list(tmp_path.iterdir())) == 4, "nothing else is left"


def test_a_disk_that_fills_leaves_whole_rows_and_the_rest_goes_on(
    llmctl, many, tmp_path, monkeypatch
):
    append, appended = keeping.append, []

    def fills(self, content):
        appended.append(content)
        if len(appended) == 9:  # the fifth of the .jsonl
            self._file.write(content[:7])  # as a disk takes what it has room for
            raise OSError(errno.ENOSPC, "No space left on device", str(self._path))
        append(self, content)

    monkeypatch.setattr(keeping, "append", fills)
    (tmp_path / "out.partial.csv").write_text("of an earlier run")
    done = llmctl(*many)
    assert done.code == 3 and "error[OutOfDisk]" in done.err, done
    assert f"it had 4 of 12 prompts; kept in {tmp_path / 'out.partial.2.csv'}" in done.err
    assert len((tmp_path / "out.partial.2.csv").read_text().splitlines()) == 4
    assert (tmp_path / "out.partial.csv").read_text() == "of an earlier run"
    assert not (tmp_path / "out.csv").exists()
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 12
    assert done.out.count("Output [") == 12


def test_a_run_that_is_cut_before_its_first_result_leaves_nothing(tmp_path):
    (tmp_path / "out.csv").write_text("old")
    with pytest.raises(KeyboardInterrupt):
        write_results(Interrupts(), csv=tmp_path / "out.csv", npy=tmp_path / "out.npy")
    assert [path.name for path in tmp_path.iterdir()] == ["out.csv"]
    assert (tmp_path / "out.csv").read_text() == "old"


class Interrupts(list):
    """Outputs whose first is never there."""

    def __iter__(self):
        raise KeyboardInterrupt


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
def test_a_disk_that_fills_at_the_last_flush_leaves_nothing(tmp_path, monkeypatch):
    def opened(handle, *arguments, **options):
        os.close(handle)
        return open("/dev/full", *arguments, **options)

    monkeypatch.setattr(os, "fdopen", opened)
    for kind in ("csv", "npy"):
        with pytest.raises(OSError, match=f"x.{kind}"):
            write_results([[1]], **{kind: tmp_path / f"x.{kind}"})
    assert list(tmp_path.iterdir()) == []
