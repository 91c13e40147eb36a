"""Files of results that a cut, a full disk or a reader that has gone leaves behind."""

from __future__ import annotations

import errno
import io
import json
import sys
from types import SimpleNamespace

import pytest
from support.run import write_results

from llmctl.cli import main
from llmctl.cli.output_files import created_mode, keeping
from llmctl.cli.run import session
from llmctl.cli.run.generate import Row, SequenceOutput
from llmctl.cli.run.report import summarize
from llmctl.cli.run.result_files import Files, ResultFiles
from llmctl.cli.streams import LateStream
from llmctl.errors import DeviceFailure, ExecutorClosed, PromptTooLong, RankFailure
from llmctl.runtime.api.executor import Executor
from llmctl.runtime.request import Request, SamplingConfig
from llmctl.runtime.stats.counters import SpeculationStats

FULL = OSError(errno.ENOSPC, "No space left on device")


def ended(count):
    """Rows that ended; the token of each is its index."""
    return [Row(i, "", sequences=[SequenceOutput([i])], is_done=True) for i in range(count)]


def opened(rows, folder, said=None):
    files = Files(csv=folder / "x.csv", jsonl=folder / "x.jsonl")
    tokenizer = SimpleNamespace(end_id=None, decode=str)
    return ResultFiles(files, tokenizer, rows, (said if said is not None else []).append)


def indices(path):
    return [json.loads(line)["index"] for line in path.read_text().splitlines()]


def test_a_cut_run_keeps_what_ended_behind_a_prompt_that_had_not(tmp_path):
    rows, said = ended(5), []
    rows[1].is_done = rows[4].is_done = False
    with pytest.raises(KeyboardInterrupt), opened(rows, tmp_path, said) as files:
        files.add(rows[0])
        rows[0].forget_tokens()
        raise KeyboardInterrupt
    assert indices(tmp_path / "x.partial.jsonl") == [0, 2, 3]
    assert (tmp_path / "x.partial.csv").read_text() == "0\n", "its rows do not say whose they are"
    assert "x.csv was not completed: it had 1 of 5" in said[0] and "it had 3 of 5" in said[1]
    for kept in tmp_path.iterdir():
        assert kept.stat().st_mode & 0o777 == created_mode(0o666)


@pytest.mark.parametrize(
    "lost", [RankFailure("x", fix=""), DeviceFailure("x"), ExecutorClosed("x")]
)
def test_what_every_request_ran_on_is_lost(tmp_path, lost):
    rows = ended(5)
    rows[1].error = rows[3].error = lost
    with opened(rows, tmp_path) as files:
        for row in rows:
            files.add(row)
            row.forget_tokens()
    assert indices(tmp_path / "x.partial.jsonl") == [0, 2, 4]
    texts = (tmp_path / "x.partial.jsonl").read_text()
    assert '"token_ids": [2]' in texts and '"token_ids": [4]' in texts
    assert (tmp_path / "x.partial.csv").read_text() == "0\n"


def test_a_row_that_the_cut_halved_is_written_again(tmp_path, monkeypatch):
    rows, append = ended(3), keeping.append

    def halves(self, content):
        if b'"index": 1' in content:
            monkeypatch.undo()
            self._file.write(content[:9])
            raise KeyboardInterrupt
        append(self, content)

    monkeypatch.setattr(keeping, "append", halves)
    with pytest.raises(KeyboardInterrupt), opened(rows, tmp_path) as files:
        for row in rows:
            files.add(row)
    assert indices(tmp_path / "x.partial.jsonl") == [0, 1, 2]


def test_half_of_an_array_is_not_kept(tmp_path, monkeypatch):
    append, appended = keeping.append, []

    def fills(self, content):
        appended.append(content)
        if len(appended) == 3:
            raise FULL
        append(self, content)

    monkeypatch.setattr(keeping, "append", fills)
    with pytest.raises(OSError, match="No space"):
        write_results([[1], [2]], npy=tmp_path / "x.npy")
    assert not list(tmp_path.iterdir())


def test_a_file_that_cannot_be_opened_leaves_nothing_of_the_others(tmp_path):
    with pytest.raises(OSError, match="absent"):
        write_results([[1]], csv=tmp_path / "x.csv", jsonl=tmp_path / "absent" / "x.jsonl")
    assert not list(tmp_path.iterdir())


def test_a_prompt_that_failed_has_the_lines_of_all_its_outputs(tmp_path):
    sampling = SamplingConfig(top_k=2, num_return_sequences=3)
    failed = Row(0, "", Request((1,), 4, sampling), error=PromptTooLong("x"))
    with opened([failed], tmp_path) as files:
        files.add(failed)
    assert (tmp_path / "x.csv").read_text() == "\n\n\n"


def test_figures_outlive_the_tokens():
    output = SequenceOutput([5, 6, 7], 3, first_s=0.5, last_s=1.5, num_times=3, num_first_tokens=1)
    rows = [Row(0, "", Request((1,), 3), sequences=[output], first_token_s=0.5, is_done=True)]
    figures = [summarize(rows, 2.0, 0, SpeculationStats()).to_json()]
    rows[0].forget_tokens()
    figures.append(summarize(rows, 2.0, 0, SpeculationStats()).to_json())
    assert output.token_ids == [] and figures[0] == figures[1]


# ---- the program ----


class Ends(io.StringIO):
    """A stdout that has room for two lines."""

    def __init__(self, error):
        super().__init__()
        self.error, self.num_failed = error, 0

    def flush(self):
        if self.getvalue().count("\n") > 2 and not self.num_failed:  # then it has room again
            self.num_failed += 1
            raise self.error


@pytest.fixture
def line(engines, tmp_path):
    (tmp_path / "in.txt").write_text("".join(f"x = {i}\n" for i in range(12)))
    words = ["run", "--engine-dir", engines.target, "--input-file", tmp_path / "in.txt"]
    return [*words, "--max-output-len", 2, "--end-id", -1]


@pytest.mark.parametrize("option", [(), ("--streaming",)])
@pytest.mark.parametrize(("error", "code"), [(FULL, 3), (BrokenPipeError(), 141)])
def test_files_are_whole_where_stdout_ends(
    llmctl, line, tmp_path, monkeypatch, error, code, option
):
    out = Ends(error)
    monkeypatch.setattr(main, "silence_stdout", lambda: None)
    monkeypatch.setattr(sys, "stdout", out)
    done = llmctl(*line, *option, "--output-jsonl", tmp_path / "x.jsonl")
    assert done.code == code and ("OutOfDisk" in done.err) == (code == 3)
    assert indices(tmp_path / "x.jsonl") == list(range(12)) and out.num_failed == 1
    assert out.getvalue().count("Output") < 12


def test_a_run_without_files_ends_with_its_stdout():
    stream = LateStream(Ends(FULL), has_files=False)
    stream.write("\n\n\n")
    with pytest.raises(OSError, match="No space"):
        stream.flush()


def test_no_more_requests_are_sent_than_four_batches_hold(llmctl, line, monkeypatch):
    monkeypatch.setattr(session, "BATCHES_IN_FLIGHT", 1)  # of 8
    enqueue, sizes = Executor.enqueue_requests, []

    def counted(self, requests):
        sizes.append(len(requests))
        return enqueue(self, requests)

    monkeypatch.setattr(Executor, "enqueue_requests", counted)
    assert llmctl(*line).code == 0
    assert sizes[0] == 8 and sum(sizes) == 12


def test_a_full_disk_is_told_where_every_prompt_was_refused(llmctl, engines, tmp_path, monkeypatch):
    def fills(self, content):
        raise FULL

    monkeypatch.setattr(keeping, "append", fills)
    (tmp_path / "in.jsonl").write_text(json.dumps({"input_ids": [5] * 6000}))
    words = ["run", "--engine-dir", engines.target, "--input-file", tmp_path / "in.jsonl"]
    done = llmctl(*words, "--max-output-len", 2, "--output-csv", tmp_path / "x.csv")
    assert done.code == 3 and "error[OutOfDisk]" in done.err, done
