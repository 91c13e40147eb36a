"""`llmctl dataset`: requests for `llmctl bench`, one JSON object per line.

The format and the options are those of TensorRT-LLM's prepare_dataset.py; the options before the
subcommand are common to all of them.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from llmctl.cli.output_files import JSON_LINES, ending, require_writable
from llmctl.cli.streams import is_stdout_an_empty_file
from llmctl.errors import BadConfig

if TYPE_CHECKING:
    from llmctl.cli.dataset.rows import DatasetRow
    from llmctl.cli.tokenizer import Tokenizer

DEFAULT_SEED = 420  # prepare_dataset.py's
# trtllm-bench asks for no ending, and its guides write prepare_dataset.py's rows to .txt files.
ENDINGS = (*JSON_LINES, ".txt")
MOST_REQUESTS = 1_000_000  # of a benchmark, whose requests are in memory together


class LogLevel(enum.StrEnum):
    """Whether a summary goes to stderr."""

    info = "info"
    debug = "debug"
    warning = "warning"
    error = "error"


class _Common(NamedTuple):
    """The options before the subcommand."""

    tokenizer: str | None  # required, though not by --help of a subcommand
    output: Path | None
    seed: int
    is_quiet: bool


dataset = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Make requests for `llmctl bench`: prompts and output lengths, a JSON object a line.\n\n"
    "Examples:\n"
    "  llmctl dataset --tokenizer examples/demo-target --stdout token-norm-dist \\\n"
    "      --num-requests 1000 --input-mean 500 --input-stdev 0 --output-mean 200 \\\n"
    "      --output-stdev 0 > dataset.jsonl",
)

NumRequests = Annotated[
    int, typer.Option("--num-requests", min=1, max=MOST_REQUESTS, help="Rows to make.")
]


@dataset.callback()
def common(
    context: typer.Context,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="Model folder, engine directory, or a model's name on the hub."),
    ] = None,
    stdout: Annotated[
        bool, typer.Option("--stdout", help="Print the rows; also without --output.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(callback=ending(*ENDINGS), help="Write the rows to this .jsonl file."),
    ] = None,
    random_seed: Annotated[
        int, typer.Option(min=0, help="The same seed makes the same rows.")
    ] = DEFAULT_SEED,
    log_level: Annotated[
        LogLevel, typer.Option(help="info, debug: one line on stderr says what was made.")
    ] = LogLevel.info,
) -> None:
    if stdout and output is not None:
        raise BadConfig("--stdout and --output are both given; one of them is wanted")
    if output is not None:
        require_writable(output)
    is_quiet = log_level in (LogLevel.warning, LogLevel.error)
    context.obj = _Common(tokenizer, output, random_seed, is_quiet)


@dataset.command("token-norm-dist", short_help="Random tokens, normally distributed lengths.")
def token_norm_dist(
    context: typer.Context,
    num_requests: NumRequests,
    input_mean: Annotated[float, typer.Option(help="Mean prompt length, tokens.")],
    input_stdev: Annotated[float, typer.Option(help="Its standard deviation, tokens.")],
    output_mean: Annotated[float, typer.Option(help="Mean output length, tokens.")],
    output_stdev: Annotated[float, typer.Option(help="Its standard deviation, tokens.")],
) -> None:
    """Prompts of random tokens; lengths are max(1, ceil(normal draw)).

    Examples:
      llmctl dataset --tokenizer examples/demo-target token-norm-dist --num-requests 100 \\
          --input-mean 500 --input-stdev 50 --output-mean 200 --output-stdev 0
    """
    from llmctl.cli.dataset.lengths import NormalLengths

    inputs = NormalLengths(input_mean, input_stdev)
    outputs = NormalLengths(output_mean, output_stdev)
    _make_random(context.obj, num_requests, inputs, outputs)


@dataset.command("token-unif-dist", short_help="Random tokens, uniformly distributed lengths.")
def token_unif_dist(
    context: typer.Context,
    num_requests: NumRequests,
    input_min: Annotated[int, typer.Option(help="Shortest prompt, tokens.")],
    input_max: Annotated[int, typer.Option(help="Longest prompt, tokens.")],
    output_min: Annotated[int, typer.Option(help="Shortest output, tokens.")],
    output_max: Annotated[int, typer.Option(help="Longest output, tokens.")],
) -> None:
    """Prompts of random tokens; every length from min to max is equally likely.

    Examples:
      llmctl dataset --tokenizer examples/demo-target token-unif-dist --num-requests 100 \\
          --input-min 100 --input-max 900 --output-min 50 --output-max 150
    """
    from llmctl.cli.dataset.lengths import UniformLengths

    inputs = UniformLengths(input_min, input_max)
    outputs = UniformLengths(output_min, output_max)
    _make_random(context.obj, num_requests, inputs, outputs)


@dataset.command("text", short_help="Prompts from a text file.")
def text(
    context: typer.Context,
    input_file: Annotated[
        Path,
        typer.Option(
            "--input-file", "--dataset-name", help=".txt: a prompt a line; .jsonl: objects."
        ),
    ],
    dataset_input_key: Annotated[
        str | None, typer.Option(help="The prompt's key in a .jsonl row; default: text.")
    ] = None,
    dataset_output_key: Annotated[
        str | None, typer.Option(help="Key of a text whose length sets the output length.")
    ] = None,
    dataset_prompt: Annotated[
        str | None, typer.Option(help="Text to put before every prompt, with a space.")
    ] = None,
    dataset_prompt_key: Annotated[
        str | None, typer.Option(help="Key of such a text in every row.")
    ] = None,
    num_requests: Annotated[
        int | None,
        typer.Option(min=1, max=MOST_REQUESTS, help="Stop after so many rows; default: all."),
    ] = None,
    max_input_len: Annotated[
        int | None, typer.Option(min=1, help="Skip longer prompts (tokens).")
    ] = None,
    input_len_dist: Annotated[
        str | None,
        typer.Option(help="mean,stdev: cut prompts of such lengths from random places instead."),
    ] = None,
    output_len_dist: Annotated[
        str | None, typer.Option(help="mean,stdev of the output lengths, tokens.")
    ] = None,
) -> None:
    """Prompts from a file: its rows as they are, or pieces of its text.

    Examples:
      llmctl dataset --tokenizer examples/demo-target text --input-file examples/heldout.txt \\
          --num-requests 100 --input-len-dist 128,0 --output-len-dist 64,0
    """
    from llmctl.cli.dataset.lengths import NormalLengths
    from llmctl.cli.dataset.text import TextOptions, text_rows

    def lengths(option: str, value: str | None) -> NormalLengths | None:
        return None if value is None else NormalLengths.parse(option, value)

    options = TextOptions(
        path=input_file,
        input_key=dataset_input_key,
        output_key=dataset_output_key,
        prompt=dataset_prompt,
        prompt_key=dataset_prompt_key,
        num_requests=num_requests,
        max_input_len=max_input_len,
        input_lengths=lengths("--input-len-dist", input_len_dist),
        output_lengths=lengths("--output-len-dist", output_len_dist),
    )
    chosen = context.obj
    if chosen.output is not None:
        require_writable(chosen.output, source=input_file)
    _write(chosen, text_rows(options, _tokenizer(chosen), chosen.seed), num_requests)


def _make_random(chosen: _Common, num_requests: int, inputs: Any, outputs: Any) -> None:
    from llmctl.cli.dataset.rows import random_rows

    rows = random_rows(_tokenizer(chosen), num_requests, inputs, outputs, chosen.seed)
    _write(chosen, rows)


def _tokenizer(chosen: _Common) -> Tokenizer:
    from llmctl.cli.dataset.rows import open_tokenizer

    if chosen.tokenizer is None:
        raise BadConfig("--tokenizer is missing", fix="llmctl dataset --tokenizer DIR ...")
    return open_tokenizer(chosen.tokenizer)


def _write(chosen: _Common, rows: Iterable[DatasetRow], num_asked: int | None = None) -> None:
    from llmctl.cli.dataset.rows import summary, write_rows

    # prepare_dataset.py's users write `--output FILE ... > rows.txt` and give rows.txt to the
    # benchmark; rows that went to FILE alone would leave it an empty file.
    is_printed = chosen.output is None or is_stdout_an_empty_file(chosen.output)
    written = write_rows(rows, chosen.output, sys.stdout if is_printed else None)
    if not chosen.is_quiet:
        if is_printed and chosen.output is not None:
            print(f"rows are in {chosen.output}, and on stdout, which is a file", file=sys.stderr)
        print(summary(written, num_asked), file=sys.stderr)
