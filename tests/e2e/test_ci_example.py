"""examples/ci: the pipeline runs, stops by exit codes, and finds engines in its cache."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from support.e2e import DemoPair

ROLES = ("target", "draft")


@pytest.fixture
def pipeline(demo: DemoPair, repository: Path, tmp_path: Path):
    """Run the script on the demo pair, which is quantized already."""
    output = tmp_path / "out"
    output.mkdir()
    for role in ROLES:
        (output / f"{role}-fp8").symlink_to(demo.quantized("whole" if role == "target" else role))
    program = tmp_path / "llmctl"
    program.write_text(f'#!/bin/sh\nexec {shlex.join(demo.program.command)} "$@"\n')
    program.chmod(0o755)

    def run(**variables: str) -> tuple[subprocess.CompletedProcess[str], Path]:
        environment = os.environ | {"LLMCTL": str(program), "PYTHON": sys.executable} | variables
        done = subprocess.run(
            [repository / "examples/ci/pipeline.sh", output],
            capture_output=True,
            text=True,
            env=environment,
            timeout=600,
        )
        return done, output / "reports"

    return run


def test_the_pipeline_builds_checks_and_measures_the_pair_and_then_uses_its_cache(pipeline):
    done, reports = pipeline(BACKEND="cpu")
    assert done.returncode == 0, done.stderr
    run, bench = (json.loads((reports / f"{name}.json").read_text()) for name in ("run", "bench"))
    assert run["stats"]["num_failed"] == 0 and len(run["outputs"]) == 3
    assert run["stats"]["speculation"]["draft_len"] == 4
    assert bench["decoding_stats"]["acceptance_length"] > 2
    assert bench["baseline"]["speedup"]["num_pairs"] == 8
    keys = {path.name for path in (reports.parent / "engines").iterdir()}
    assert len(keys) == 2 and all(key in done.stderr for key in keys)
    for role in ROLES:
        memory = json.loads((reports / f"memory-{role}.json").read_text())
        assert memory["memory"]["fits"]

    built = [(reports / f"build-{role}.json").stat().st_mtime_ns for role in ROLES]
    again, _ = pipeline(BACKEND="cpu", MIN_ACCEPTANCE_LENGTH="4.99")
    assert again.returncode == 1 and "below 4.99" in again.stderr
    assert again.stderr.count("is in the cache") == 2
    assert built == [(reports / f"build-{role}.json").stat().st_mtime_ns for role in ROLES]


def test_the_pipeline_stops_where_the_backend_does_not_work(pipeline):
    done, reports = pipeline(BACKEND="tensorrt", PATH=os.environ["PATH"])
    found = json.loads((reports / "doctor.json").read_text())
    (backend,) = [b for b in found["backends"] if b["name"] == "tensorrt"]
    if backend["run"]["ok"]:
        pytest.skip("TensorRT works on this machine, so nothing stops the pipeline")
    assert done.returncode == 3 and "== build" not in done.stderr
    assert backend["run"]["fix"] in done.stderr


@pytest.mark.parametrize("arguments", [[], ["--help"], ["out", "target-without-draft"]])
def test_the_pipeline_tells_how_it_is_used(repository, tmp_path, arguments):
    script = repository / "examples/ci/pipeline.sh"
    done = subprocess.run([script, *arguments], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and "pipeline.sh OUTPUT_DIR" in done.stderr
    assert not list(tmp_path.iterdir())


def test_the_workflow_runs_the_script_and_keeps_its_reports(repository):
    text = (repository / "examples/ci/llmctl.yml").read_text()
    (job,) = yaml.safe_load(text)["jobs"].values()
    commands = [step["run"] for step in job["steps"] if "run" in step]
    script, output = next(c for c in commands if "pipeline.sh" in c).split()
    assert os.access(repository / script, os.X_OK)
    (reports,) = [s["with"]["path"] for s in job["steps"] if "upload" in s.get("uses", "")]
    assert reports == f"{output}/reports"
    cached = [s["with"]["path"] for s in job["steps"] if "cache@" in s.get("uses", "")]
    assert cached == [f"{output}/*-fp8", "engine-cache"]
