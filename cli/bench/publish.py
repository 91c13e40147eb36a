"""Publishes a benchmark's results: files, the table on stderr, the line on stdout, the exit
code."""

from __future__ import annotations

import json
import sys
from typing import Any

from llmctl.cli.bench.report import raw_lines, report_json
from llmctl.cli.bench.session import Measured
from llmctl.cli.bench.table import make_console, print_report
from llmctl.cli.endings import EXIT_FAILURE, EXIT_INTERRUPT, EXIT_TERMINATED
from llmctl.cli.output_files import replacing
from llmctl.cli.signals import Terminated
from llmctl.cli.streams import json_line, results_on_stdout


def publish_results(measured: Measured) -> int:
    """Write and print everything; the exit code: 0, 1 when a request failed, 130 or 143 after a
    signal. Then raises what ended the session."""
    report = report_json(measured)
    line = json_line(report)
    with results_on_stdout():
        try:
            _write_files(measured, report, line)
        finally:  # results are shown even if a disk is full
            if not measured.options.is_json:
                print_report(report, make_console())
            print(line, flush=True)
        if measured.failure is not None:
            raise measured.failure
    return exit_code(measured, report["request_info"]["num_failed"])


def exit_code(measured: Measured, num_failed: int) -> int:
    """See `publish_results`; says that a session was interrupted."""
    if measured.interrupt is not None:
        print("llmctl: interrupted", file=sys.stderr)
        return EXIT_TERMINATED if issubclass(measured.interrupt, Terminated) else EXIT_INTERRUPT
    return EXIT_FAILURE if num_failed else 0


def _write_files(measured: Measured, report: dict[str, Any], line: str) -> None:
    files = measured.options.files
    if files.raw is not None:
        with replacing(files.raw, "w") as file:
            file.writelines(f"{item}\n" for item in raw_lines(measured))
    if files.report_json is not None:
        with replacing(files.report_json, "w") as file:
            file.write(line + "\n")
    if files.report is not None:
        from llmctl.cli.bench.page import page

        with replacing(files.report, "w") as file:
            file.write(page(measured, report))
    if files.trace is not None:
        from llmctl.cli.bench.trace import trace_json

        with replacing(files.trace, "w") as file:
            json.dump(trace_json(measured), file)
