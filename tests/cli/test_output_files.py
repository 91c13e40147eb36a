"""Output files: whole or not there, and what is no file is written as it is."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

import numpy as np
import pytest
from support.run import write_results

from llmctl.cli.output_files import replacing, require_writable
from llmctl.errors import BadConfig


def test_an_output_path_without_a_folder_is_refused_before_anything_runs(tmp_path):
    require_writable(tmp_path / "x.csv")
    for path, reason in ((tmp_path / "none" / "x.csv", "writable folder"), (tmp_path, "a folder;")):
        with pytest.raises(BadConfig, match=f"cannot be written: .*{reason}"):
            require_writable(path)


@pytest.mark.parametrize(
    "name",
    [
        "rank0.engine",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "config.json",
        "tokenizer.json",
    ],
)
def test_an_output_does_not_replace_a_file_of_a_model(tmp_path, name):
    """`--output-csv out/target/rank0.engine` destroyed the engine that it had just run."""
    path, link = tmp_path / name, tmp_path / "x.csv"
    require_writable(path)  # nothing is lost: it is not there
    path.write_text("weights")
    link.symlink_to(path)
    for output in (path, link):
        with pytest.raises(BadConfig, match="not replaced"):
            require_writable(output)
    require_writable(tmp_path / "config.json.html", tmp_path / "my.engine.csv")


BENCH = ("bench", "latency", "--engine-dir", "e")
RUN = ("run", "--engine-dir", "e", "--input-text", "x")
BUILD = ("build", "--checkpoint-dir", "c")
DATASET = ("dataset", "--tokenizer", "t")


@pytest.mark.parametrize(
    ("command", "option", "name", "wanted"),
    [
        (BENCH, "--report", "x.pdf", ".html or .htm"),
        (BENCH, "--trace", "x.json.gz", ".json"),
        (BENCH, "--raw", "x.csv", ".jsonl or .json"),
        (BENCH, "--report-json", "x.html", ".json or .jsonl"),
        (RUN, "--output-csv", "x.npy", ".csv"),
        (RUN, "--output-npy", "x.csv", ".npy"),
        (RUN, "--output-jsonl", "x.csv", ".jsonl or .json"),
        (RUN, "--output-log-probs-npy", "x.npz", ".npy"),
        (RUN, "--output-cum-log-probs-npy", "x.npz", ".npy"),
        (BUILD, "--visualize-network", "x.onnx", ".txt"),
        (DATASET, "--output", "x.parquet", ".jsonl or .json or .txt"),
        (("inspect", "e"), "--graph", "x.pdf", ".html or .dot"),
    ],
)
def test_a_name_that_ends_as_another_format_does_is_refused(
    llmctl, tmp_path, monkeypatch, command, option, name, wanted
):
    """`--report x.pdf` wrote HTML. Nothing else of the command line is looked at before: what it
    names does not exist."""
    monkeypatch.chdir(tmp_path)
    done = llmctl(*command, option, name)
    assert done.code == 2 and "error[BadConfig]" in done.err and name in done.err
    assert option in done.err and f"must end in {wanted}" in done.err and "fix: " in done.err
    assert list(tmp_path.iterdir()) == []


def test_an_ending_may_be_in_capitals_or_absent(llmctl):
    for name in ("x.HTML", "x.htm", "x", "/dev/stdout", "/dev/fd/1"):
        assert "error[EngineNotFound]" in llmctl(*BENCH, "--report", name).err, name


def test_a_config_file_is_held_to_it_too(llmctl, tmp_path):
    config = tmp_path / "bench.yaml"
    config.write_text("report: x.pdf\n")
    done = llmctl(*BENCH, "--config", config)
    assert done.code == 2 and "--report is x.pdf; its name must end in .html" in done.err


def test_links_devices_and_pipes_stay_what_they_are(tmp_path):
    real, link = tmp_path / "real.csv", tmp_path / "link.csv"
    real.write_text("old")
    link.symlink_to(real)
    write_results([[1, 2]], csv=link)
    assert link.is_symlink() and real.read_text() == "1,2\n"

    pipe = tmp_path / "pipe.npy"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    require_writable(pipe, Path(os.devnull), Path(os.devnull))
    write_results([[1, 2], [3]], npy=pipe)
    content = os.read(reader, 1000)
    os.close(reader)
    (tmp_path / "read.npy").write_bytes(content)
    assert np.load(tmp_path / "read.npy").tolist() == [[1, 2], [3, -1]]
    assert pipe.is_fifo()

    write_results([[1]], jsonl=Path(os.devnull))
    assert Path(os.devnull).is_char_device()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "link.csv",
        "pipe.npy",
        "read.npy",
        "real.csv",
    ]


def test_two_outputs_have_two_files_with_names_that_fit(tmp_path):
    link = tmp_path / "link.csv"
    link.symlink_to(tmp_path / "x.csv")
    with pytest.raises(BadConfig, match="two outputs"):
        require_writable(tmp_path / "x.csv", link)
    with pytest.raises(BadConfig, match="its name has over"):
        require_writable(tmp_path / ("x" * 250))
    require_writable(tmp_path / "x.csv", tmp_path / "y.csv")


def test_names_that_lead_nowhere_are_refused(tmp_path):
    loop, held = tmp_path / "loop", tmp_path / "socket"
    loop.symlink_to(loop)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(held))
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for paths in ((loop,), (loop / "x",), (tmp_path / ("x" * 300),), (held,), (pipe, pipe)):
        with pytest.raises(BadConfig):
            require_writable(*paths)
    listener.close()


def test_places_where_permissions_say_nothing_are_refused_before_anything_runs(tmp_path):
    """They ended in an error without a name when everything had been computed."""
    with open(os.devnull) as reading:
        refused = ["/proc/x.csv", "/proc/self/comm", "/sys/x.csv", f"/dev/fd/{reading.fileno()}"]
        for path in refused:
            with pytest.raises(BadConfig, match=rf"^{path} cannot be written: [^']*$"):
                require_writable(Path(path))
    require_writable(tmp_path / ("x" * 200))
    assert list(tmp_path.iterdir()) == []


def test_a_file_keeps_its_mode_and_a_new_one_has_that_of_the_umask(tmp_path):
    old = tmp_path / "old.csv"
    mask = os.umask(0o027)
    try:
        for mode in (0o600, 0o664):
            old.write_text("x")
            old.chmod(mode)
            write_results([[1]], csv=old)
            assert old.stat().st_mode & 0o777 == mode and old.read_text() == "1\n"
        write_results([[1]], csv=tmp_path / "new.csv")
    finally:
        os.umask(mask)
    assert (tmp_path / "new.csv").stat().st_mode & 0o777 == 0o640


def test_what_cannot_take_its_name_leaves_nothing(tmp_path):
    taken = tmp_path / "taken"
    with pytest.raises(OSError), replacing(taken, "w") as file:
        file.write("x")
        taken.mkdir()
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


@pytest.mark.parametrize("redirection", [">", ">>"])
def test_stdout_by_name_keeps_what_else_is_written_there(
    forked_program, engines, tmp_path, redirection
):
    out = tmp_path / "out.txt"
    out.write_text("before\n")
    command = f'"$@" {redirection} {out}'
    run = ["run", "--engine-dir", engines.target, "--max-output-len", 3, "--input-text", "a b"]
    words = [*forked_program.command, *map(str, run), "--output-jsonl", "/dev/stdout"]
    subprocess.run(["bash", "-c", command, "sh", *words], check=True, capture_output=True)
    text = out.read_text()
    assert text.startswith("before\n") == (redirection == ">>")
    assert "Output [Text 0" in text and '"token_ids"' in text
