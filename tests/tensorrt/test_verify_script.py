"""scripts/tensorrt/verify.py on a machine made of the CPU, and where it must refuse or fail."""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from support.tensorrt.fake_engines import write_fake_engine
from support.tensorrt.fake_machine import pretend, pretend_gpu
from support.tensorrt.fake_tensorrt import Context, FakeModule

from scripts.tensorrt import checks as tensorrt_checks
from scripts.tensorrt import verify as verify_tensorrt
from scripts.tensorrt.checks import Findings
from scripts.tensorrt.verify import CASES, Case, failures

FEW = (Case("fp8 per token"), Case("bfloat16", "continuous"))


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch, repository: Path, tmp_path: Path) -> FakeModule:
    """The package, on a machine where the demo's small draft is its target, too."""
    examples = tmp_path / "examples"
    examples.mkdir()
    for role in ("target", "draft"):
        (examples / f"demo-{role}").symlink_to(repository / "examples/demo-draft")
    (examples / "heldout.txt").symlink_to(repository / "examples/heldout.txt")
    monkeypatch.setattr(verify_tensorrt, "EXAMPLES", examples)
    found = FakeModule(pytest.importorskip("tensorrt_rtx", reason="the networks are TensorRT's"))
    pretend(monkeypatch, found)
    monkeypatch.setattr(tensorrt_checks, "NUM_REQUESTS", 3)
    return found


def run(module: FakeModule, *arguments: object) -> int:
    def build(checkpoint: Path, folder: Path, backend: str, options: dict[str, Any]) -> None:
        assert backend == "tensorrt-rtx"
        write_fake_engine(checkpoint, folder, module, **options)

    return verify_tensorrt.main(["--num-tokens", "3", *map(str, arguments)], build)


def test_one_command_reports_agreement_exactness_and_speed(
    module, monkeypatch, tmp_path, capsys
) -> None:
    monkeypatch.setattr(verify_tensorrt, "CASES", FEW)
    assert run(module, "--json", tmp_path / "report.json") == 0
    out = capsys.readouterr().out
    assert out.startswith("NVIDIA GeForce RTX 4090 (compute capability 8.9), tensorrt_rtx 1.7.1\n")
    assert out.endswith("everything agrees\n")
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["failed"] == [] and list(report["findings"]) == [case.name for case in FEW]
    for name, found in report["findings"].items():
        assert name in out and len(found["errors"]) == 6, "every step that has logits"
        assert found["differing"] == {"alone": 0, "draft": 0, "n-gram": 0}
        assert found["tokens_s"]["plain"] > 0 and found["prefill_tokens_s"] > 0


def test_a_plan_that_computes_something_else_fails_the_check(
    module, monkeypatch, tmp_path, capsys
) -> None:
    monkeypatch.setattr(verify_tensorrt, "CASES", FEW[:1])
    monkeypatch.setattr(tensorrt_checks, "NUM_REQUESTS", 1)
    computed = Context._compute

    def compute(context: Context) -> None:
        computed(context)
        if "logits" in context.addresses:
            memory = (ctypes.c_float * 2048).from_address(context.addresses["logits"])
            memory[:] = [-value for value in memory]

    monkeypatch.setattr(Context, "_compute", compute)
    assert run(module) == 1
    out = capsys.readouterr().out
    assert "FAILED\nfp8 per token, paged: logits of" in out


def test_requests_with_other_tokens_fail_the_check() -> None:
    found = Findings({"prompt": 0.01}, (1, 1), {"alone": 0, "draft": 2}, num_requests=8)
    assert failures(Case("bfloat16"), found) == [
        "bfloat16, paged: 2 of 8 requests got other tokens (draft)"
    ]
    found.errors["generation"] = float("nan")
    assert "logits of generation differ by nan" in failures(Case("bfloat16"), found)[0]


def test_every_form_is_among_the_cases() -> None:
    assert {case.form for case in CASES} == set(verify_tensorrt.MAX_ERROR)
    assert {case.cache for case in CASES} == {"paged", "continuous"}


@pytest.mark.parametrize(
    "capability, arguments, code, message",
    [
        (None, [], 3, "NoDevice: backend 'tensorrt-rtx' (package tensorrt_rtx) is requested"),
        ((9, 0), ["--backend", "tensorrt-rtx"], 4, "TensorRT-RTX does not run on NVIDIA H200"),
        ((9, 0), [], 3, "needs the package tensorrt, which"),
    ],
)
def test_a_machine_that_cannot_run_is_refused_by_name(
    capability, arguments, code, message, monkeypatch, capsys
) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    pretend_gpu(monkeypatch, capability, "NVIDIA H200")
    assert verify_tensorrt.main(arguments) == code
    err = capsys.readouterr().err
    assert message in err and ("--backend cpu" in err or "pip install" in err)
