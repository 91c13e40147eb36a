"""What tests of `llmctl run` share."""

from __future__ import annotations

from types import SimpleNamespace

from llmctl.cli.run.generate import Row, SequenceOutput
from llmctl.cli.run.result_files import Files, ResultFiles

TWO = ["--input_text", "def add(a, b):", "class Bar:"]


def ids(found):
    return [item["token_ids"] for item in found]


def write_results(outputs, pad_id=-1, **files):
    """Token ids, or log-probabilities, of one output a row, to files named as fields of Files."""
    tokenizer = SimpleNamespace(end_id=pad_id, decode=str)
    rows: list[Row] = []
    with ResultFiles(Files(**files), tokenizer, rows, print) as file:
        for index, values in enumerate(outputs):
            rows.append(Row(index, "", sequences=[SequenceOutput(values, log_probs=values)]))
            file.add(rows[-1])
    file.raise_failure()
