"""Every operator's kernels on a GPU against their references, over all cases of the specs.

    python tests/gpu/check_kernels.py [--op NAME]... [--time] [--compile-only]

Cases run one after another in a worker process; where one kills the device's context or hangs, a
new worker goes on with the next case. `--time` adds the timed cases under a CUDA graph, over
enough copies of the tensors that the L2 cache holds none of them. `--compile-only` needs no GPU.
Ends with 1 where a case fails.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import queue
import subprocess
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from support.kernel import KERNEL_DTYPES
from support.kernel_case import check, specs_of

from llmctl.errors import DeviceFailure, LlmctlError, Unsupported
from llmctl.plugins.backends.cuda.compiler import compile_kernel, is_cached
from llmctl.plugins.backends.cuda.kernel_spec import KernelSpec
from llmctl.plugins.backends.cuda.read_rate import read_bandwidth
from llmctl.plugins.core.examples import make_example
from llmctl.plugins.core.op_spec import Case
from llmctl.plugins.core.operators import SPECS, has_module
from llmctl.plugins.schemes.table import FORMS

DTYPES = (*KERNEL_DTYPES, *FORMS)
CASE_SECONDS = 60  # a case that takes longer hangs
BUDGET_SECONDS = 170  # for all cases; what is not reached then fails
LARGE = 2048  # input features of a matrix that takes long to make
SHOWN_FAILURES = 4  # of an operator
DIED = 3  # exit status of a worker whose device is lost


def cases_of(op: str) -> list[tuple[Case, bool]]:
    """(case, is timed) of the cases the backend runs: 16-bit models, stored FP8 or not, and what
    works on float32 alone."""
    spec = SPECS[op]
    taken = (*DTYPES, *(["float32"] if spec.inputs[0].dtypes == ("float32",) else []))
    found = [(case, False) for case in spec.cases] + [(case, True) for case in spec.timed]
    return [(c, t) for c, t in found if c.get("x_dtype", c["dtype"]) in taken]


def operators() -> list[str]:
    """Operators that have kernels."""
    return [op for op in SPECS if has_module(op, "kernel")]


# ---- the worker and its keeper ----


def work(todo: list[tuple[str, Case, bool]], first: int, wants_time: bool) -> int:
    """Check cases from number `first` on, one line of JSON each; -1 is the read bandwidth."""
    if first < 0:
        read = median(read_bandwidth()) * 1e12 if wants_time else 0
        print(json.dumps({"read": read}), flush=True)
    for index in range(max(first, 0), len(todo)):
        op, case, is_timed = todo[index]
        is_lost = False
        try:
            result = check(op, case, is_timed, wants_time)
        except Exception as problem:  # whatever a kernel's code may raise: the next case goes on
            text = str(problem).strip() or repr(problem)
            is_lost = isinstance(problem, DeviceFailure) or "CUDA error" in text
            result = {"ok": False, "problem": f"{type(problem).__name__}: {text[:300]}"}
            if isinstance(problem, Unsupported):  # a case of the spec that other backends run
                result = {"ok": True, "refused": text}
        print(json.dumps({"index": index, **result}), flush=True)
        if is_lost:
            os._exit(DIED)  # no clean-up works on a lost device
    return 0


def supervise(
    todo: list[tuple[str, Case, bool]], arguments: list[str], budget: float
) -> list[dict[str, Any]]:
    """The bandwidth, then results of all cases, whatever happens to the workers."""
    results: list[dict[str, Any]] = []
    deadline = time.monotonic() + budget
    while len(results) <= len(todo) and time.monotonic() < deadline:
        command = [sys.executable, __file__, *arguments, "--first", str(len(results) - 1)]
        worker = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=_read_lines, args=(worker.stdout, lines), daemon=True).start()
        results += _follow(worker, lines, deadline)
    missing = len(todo) + 1 - len(results)
    return results + [{"ok": False, "problem": f"not reached in {budget:.0f} s"}] * missing


def _follow(
    worker: subprocess.Popen[str], lines: queue.Queue[str], deadline: float
) -> list[dict[str, Any]]:
    """What a worker reports until it ends; where it dies or hangs, its case is the last."""
    results: list[dict[str, Any]] = []
    while True:
        seconds = max(0.0, min(CASE_SECONDS, deadline - time.monotonic()))
        try:
            line = lines.get(timeout=seconds)
        except queue.Empty:
            worker.kill()
            worker.wait()
            if time.monotonic() < deadline:
                results.append({"ok": False, "problem": f"no result within {CASE_SECONDS} s"})
            return results
        if not line:
            status = worker.wait()
            if status not in (0, DIED):
                results.append({"ok": False, "problem": f"the worker ended with {status}"})
            return results
        results.append(json.loads(line))


def _read_lines(stream: Any, lines: queue.Queue[str]) -> None:
    for line in stream:
        if line.startswith("{"):
            lines.put(line)
    lines.put("")


def report(todo: list[tuple[str, Case, bool]], results: list[dict[str, Any]], read: float) -> int:
    """Print times, the first failures and a line per operator; the exit status."""
    lines = []
    for op in dict.fromkeys(op for op, _, _ in todo):
        own = [(c, r) for (o, c, _), r in zip(todo, results, strict=True) if o == op]
        for case, result in own:
            if "us" in result:
                print(_timing(op, case, result, read))
        failed = [(case, result) for case, result in own if not result["ok"]]
        for case, result in failed[:SHOWN_FAILURES]:
            problem = result.get("problem", f"error is {result.get('error', 0):.3g} tolerances")
            print(f"FAILED {op}: {_label(case)}: {problem}")
        worst = max((r["error"] for _, r in own if "error" in r), default=float("nan"))
        refused = sum("refused" in result for _, result in own)
        lines.append(f"{op:24} {len(own):5} {refused:7} {len(failed):6}  {worst:.3f}")
    if read:
        print(f"measured read bandwidth {read / 1e12:.3f} TB/s")
    print(f"{'operator':24} cases refused failed  worst error (tolerances)")
    print("\n".join(lines))
    return 0 if all(result.get("ok", True) for result in results) else 1


def _label(case: Case) -> str:
    return " ".join(f"{key}={value}" for key, value in case.items())


def _timing(op: str, case: Case, result: dict[str, Any], read: float) -> str:
    us = result["us"]
    rate = result["bytes"] / (us["median"] * 1e-6)
    return (
        f"{op:22} {us['median']:9.2f} us ({us['min']:.2f} to {us['max']:.2f}) "
        f"{result['bytes'] / 1e6:9.3f} MB {rate / 1e12:6.3f} TB/s {100 * rate / read:5.1f} %  "
        f"{_label(case)}"
    )


def compile_all(todo: list[tuple[str, Case, bool]]) -> int:
    """Compile in all processes what the cases need, into the cache; the number of failures.

    Cases with large matrices are left out: they take longer to make than to compile.
    """
    specs: dict[str, KernelSpec] = {}
    for op, case, _ in todo:
        if int(case.get("inner", 0)) <= LARGE:
            example = make_example(op, case)
            with suppress(Unsupported):
                specs.update({spec.name: spec for spec in specs_of(example)})
    missing = [spec for spec in specs.values() if not is_cached(spec)]
    problems = []
    if missing:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(os.cpu_count(), mp_context=context) as pool:
            problems = [text for text in pool.map(_compile, missing) if text]
    for text in problems:
        print(f"FAILED {text}")
    print(f"{len(specs)} kernels, {len(missing)} compiled now, {len(problems)} failed to compile")
    return len(problems)


def _compile(spec: KernelSpec) -> str:
    """What went wrong, if anything."""
    try:
        compile_kernel(spec)
    except LlmctlError as problem:
        return f"{spec.name}: {problem}"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--op", action="append", choices=operators(), help="only this operator")
    parser.add_argument("--time", action="store_true", help="time the spec's timed cases")
    parser.add_argument("--compile-only", action="store_true", help="stop before the GPU")
    parser.add_argument("--seconds", type=float, default=BUDGET_SECONDS, help="for all cases")
    parser.add_argument("--json", type=Path, help="write every case's result there, one a line")
    parser.add_argument("--first", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    ops = options.op or operators()
    todo = [(op, case, is_timed) for op in ops for case, is_timed in cases_of(op)]
    if options.first is not None:
        return work(todo, options.first, options.time)
    began = time.monotonic()
    failed = compile_all(todo)
    if options.compile_only:
        return 1 if failed else 0
    bandwidth, *results = supervise(todo, sys.argv[1:], options.seconds)
    if options.json:
        rows = [
            {"op": op, **case, **result}
            for (op, case, _), result in zip(todo, results, strict=True)
        ]
        options.json.write_text("".join(json.dumps(row) + "\n" for row in rows))
    status = report(todo, results, bandwidth.get("read", float("nan")))
    print(f"{time.monotonic() - began:.0f} s on {torch.cuda.get_device_name()}")
    return status


if __name__ == "__main__":
    sys.exit(main())
