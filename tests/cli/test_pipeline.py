"""quantize -> build -> run with a draft, each a process of its own, as a user types them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def folder(run_process, engines, tmp_path_factory) -> Path:
    """A folder with an FP8 checkpoint and the engine built from it."""
    folder = tmp_path_factory.mktemp("pipeline")
    done = run_process(
        *("quantize", "--model_dir", engines.target_checkpoint, "--output_dir", folder / "fp8"),
        *("--qformat", "fp8", "--kv_cache_dtype", "fp8"),
        *("--calib_size", "4", "--calib_max_seq_length", "32", "--json"),
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["num_tensors"] > 0
    done = run_process(
        *("build", "--checkpoint_dir", folder / "fp8", "--output_dir", folder / "engine"),
        *("--gemm_plugin=auto", "--use_paged_context_fmha=enable", "--max_seq_len=512"),
        *("--speculative_decoding_mode=draft_tokens_external", "--max_draft_len=4"),
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_the_pipeline_runs_from_checkpoint_to_exact_speculative_text(run_process, folder, engines):
    command = (
        *("run", "--engine_dir", folder / "engine", "--max_output_len", "24"),
        *("--input_text", "def add(a, b):", "class Bar:", "--json"),
    )
    plain = run_process(*command)
    drafted = run_process(
        *command,
        *("--draft_engine_dir", engines.draft),
        *("--draft_target_model_config=[4,[0],[0],False]", "--verify-exact"),
    )
    assert plain.returncode == drafted.returncode == 0, drafted.stderr
    assert "tokens equal plain decoding" in drafted.stderr
    found, wanted = json.loads(drafted.stdout), json.loads(plain.stdout)
    assert found["outputs"] == wanted["outputs"]
    assert "speculation" in found["stats"] and "speculation" not in wanted["stats"]


def test_an_output_directory_is_never_overwritten(run_process, folder):
    before = sorted(path.stat().st_mtime_ns for path in (folder / "engine").rglob("*"))
    done = run_process(
        *("build", "--checkpoint_dir", folder / "fp8", "--output_dir", folder / "engine"),
    )
    assert done.returncode == 1 and "error[OutputExists]" in done.stderr
    after = sorted(path.stat().st_mtime_ns for path in (folder / "engine").rglob("*"))
    assert after == before


def test_threads_of_quantize_wait_without_spinning(program, engines, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_DISPLAY_ENV", "true")  # the OpenMP library prints what it has read
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    words = [*program, "quantize", "--model_dir", str(engines.target_checkpoint)]
    words += ["--output_dir", str(tmp_path / "fp8")]
    # Torch, which loads it, is asked for a GPU; where there is none, that is all.
    words += ["--calib_size", "1", "--calib_max_seq_length", "8", "--device", "cuda"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 or "error[NoDevice]" in done.stderr
    assert "OMP_WAIT_POLICY = 'PASSIVE'" in done.stderr
