"""Check the TensorRT backends on this machine's GPU: one command, one report.

    python -m scripts.tensorrt.verify [--backend tensorrt-rtx|tensorrt] [--json FILE] [--keep DIR]

Builds the demo pair for this GPU in every form (16 bits, FP8 static, FP8 per token; pages and
slots), then compares logits with the cpu backend, generated tokens with and without a draft and
alone and together, and measures speed. Exit code: 0 where everything agrees, 1 where a check
failed, otherwise that of the refusal, which says what this machine lacks.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from llmctl.builder.build import plan_build, run_build
from llmctl.builder.config import BuildRequest
from llmctl.errors import LlmctlError
from llmctl.plugins.backends.cuda.arch import RTX_CAPABILITIES
from llmctl.runtime.engines.tensorrt_check import present_capability, require_machine
from scripts.tensorrt.checks import DRAFT_LEN, Engines, Findings, check_engine, write_fp8

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
LIMITS = {"max_batch_size": 8, "max_seq_len": 256, "max_num_tokens": 256, "tokens_per_block": 32}
# ||difference|| / ||logits|| against the cpu backend. Rounding in other places moves FP8 values
# over borders between FP8 numbers, 6 % each; docs/tensorrt.md has what the networks themselves do.
MAX_ERROR = {"bfloat16": 0.05, "fp8": 0.25, "fp8 per token": 0.25}

Build = Callable[[Path, Path, str, dict[str, Any]], None]  # checkpoint, folder, backend, options


@dataclass(frozen=True)
class Case:
    """One form of the demo pair."""

    form: str
    cache: str = "paged"

    @property
    def name(self) -> str:
        """The first column."""
        return f"{self.form}, {self.cache}"

    @property
    def options(self) -> dict[str, Any]:
        """What differs in the build request; a continuous cache has 16 bits."""
        if self.cache == "paged":
            return {}
        return {"kv_cache_type": "continuous", "kv_cache_dtype": "none"}


CASES = (
    Case("bfloat16"),
    Case("fp8"),
    Case("fp8 per token"),
    Case("bfloat16", "continuous"),
    Case("fp8", "continuous"),
)


def build_engine(checkpoint: Path, folder: Path, backend: str, options: dict[str, Any]) -> None:
    """One engine directory, for this machine's GPU."""
    capability = present_capability() if backend == "tensorrt-rtx" else None
    request = BuildRequest(**options)
    plan = plan_build(checkpoint, request, backend=backend, compute_capability=capability)
    run_build(plan, folder)


def choose_backend() -> str:
    """The package that serves the GPU that is there."""
    if torch.cuda.is_available() and present_capability() not in RTX_CAPABILITIES:
        return "tensorrt"
    return "tensorrt-rtx"


def make_checkpoint(form: str, role: str, folder: Path) -> Path:
    """The demo model of a role in a form."""
    source = EXAMPLES / f"demo-{role}"
    if form == "bfloat16":
        return source
    path = folder / f"{role} {form} checkpoint"
    return path if path.exists() else write_fp8(source, path, is_static=form == "fp8")


def build_case(case: Case, backend: str, folder: Path, build: Build) -> Engines:
    """The pair for the GPU, and the target for the cpu."""
    found = {}
    for role, draft_len in (("target", DRAFT_LEN), ("draft", 0)):
        checkpoint = make_checkpoint(case.form, role, folder)
        options = {**LIMITS, "max_draft_len": draft_len, **case.options}
        found[role] = folder / f"{case.name} {role}"
        build(checkpoint, found[role], backend, options)
    reference = folder / f"{case.name} reference"
    cache = {k: v for k, v in case.options.items() if k == "kv_cache_dtype"}
    options = {**LIMITS, "max_draft_len": DRAFT_LEN, **cache}
    build_engine(make_checkpoint(case.form, "target", folder), reference, "cpu", options)
    return Engines(found["target"], found["draft"], reference)


def failures(case: Case, found: Findings) -> list[str]:
    """What is wrong with a case, a sentence each."""
    wrong = []
    for step, error in found.errors.items():
        if not error <= MAX_ERROR[case.form]:  # NaN is wrong, too
            wrong.append(
                f"{case.name}: logits of {step} differ by {error:.3f}, "
                f"at most {MAX_ERROR[case.form]} is expected"
            )
    for way, count in found.differing.items():
        if count:
            wrong.append(
                f"{case.name}: {count} of {found.num_requests} requests got other tokens ({way})"
            )
    return wrong


def table(results: dict[str, Findings]) -> list[str]:
    """The report as lines: agreement, then speed."""
    lines = [f"{'engine':<24}{'logits':>9}{'best':>9}{'alone':>8}{'draft':>8}{'n-gram':>8}"]
    for name, found in results.items():
        agree = "{}/{}".format(*found.best_agree)
        same = "".join(
            f"{found.num_requests - found.differing[way]}/{found.num_requests}".rjust(8)
            for way in ("alone", "draft", "n-gram")
        )
        lines.append(f"{name:<24}{max(found.errors.values()):9.4f}{agree:>9}{same}")
    lines += [
        "(logits: largest ||difference|| / ||logits|| of a step against the cpu backend; best:",
        " rows with the same best token; then requests with the tokens of plain ones together)",
        "",
        f"{'engine':<24}{'prefill tok/s':>15}{'tok/s':>10}{'with draft':>12}",
    ]
    for name, found in results.items():
        plain, draft = found.tokens_s["plain"], found.tokens_s["draft"]
        lines.append(f"{name:<24}{found.prefill_tokens_s:15.0f}{plain:10.1f}{draft:12.1f}")
    return lines


def verify(backend: str, folder: Path, build: Build, num_tokens: int) -> dict[str, Findings]:
    """Build and check every case. Raises what building and running raise."""
    ids = text_ids()
    results = {}
    for case in CASES:
        print(f"{case.name}: building", file=sys.stderr, flush=True)
        engines = build_case(case, backend, folder, build)
        print(f"{case.name}: checking", file=sys.stderr, flush=True)
        results[case.name] = check_engine(engines, ids, num_tokens)
    return results


def text_ids() -> list[int]:
    """Some text that the demo pair has not seen, as tokens."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(EXAMPLES / "demo-target/tokenizer.json"))
    text = (EXAMPLES / "heldout.txt").read_text()[:4000]
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def main(argv: Sequence[str] | None = None, build: Build = build_engine) -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--backend", choices=("tensorrt-rtx", "tensorrt"))
    parser.add_argument("--json", type=Path, help="write all findings there")
    parser.add_argument("--keep", type=Path, help="build engines there and leave them")
    parser.add_argument("--num-tokens", type=int, default=32, help="generated for each request")
    options = parser.parse_args(argv)
    try:
        backend = options.backend or choose_backend()
        package = require_machine(backend)
        print(
            f"{torch.cuda.get_device_name()} (compute capability {present_capability()}), "
            f"{package.__name__} {package.__version__}"
        )
        with tempfile.TemporaryDirectory() as scratch:
            folder = options.keep or Path(scratch)
            folder.mkdir(parents=True, exist_ok=True)
            results = verify(backend, folder, build, options.num_tokens)
    except LlmctlError as error:
        print(f"{error.name}: {error}\n  {error.fix}", file=sys.stderr)
        return error.exit_code
    print("\n".join(table(results)))
    cases = {case.name: case for case in CASES}
    wrong = [line for name, found in results.items() for line in failures(cases[name], found)]
    if options.json:
        report = {name: asdict(found) for name, found in results.items()}
        options.json.write_text(json.dumps({"findings": report, "failed": wrong}, indent=2))
    print("\n" + ("everything agrees" if not wrong else "FAILED\n" + "\n".join(wrong)))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
