"""The options of `llmctl run`, those of TensorRT-LLM's run.py under their names.

Each is a type for a parameter of the command; its default is there. Options that few command
lines need are hidden from --help and shown by --help-all. The `bench` commands share some.
"""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

from typer import Option

from llmctl.cli.output_files import JSON_LINES, ending


class LogLevel(enum.StrEnum):
    """run.py's levels; each shows itself and what follows."""

    verbose = "verbose"
    info = "info"
    warning = "warning"
    error = "error"
    internal_error = "internal_error"


# ---- engines ----

EngineDir = Annotated[Path, Option("--engine-dir", help="The (target) engine.")]
DraftLen = Annotated[
    int | None,
    Option("--draft-len", help="Draft tokens per round; default: the target's max_draft_len."),
]
AdaptiveDraftLen = Annotated[
    bool,
    Option(
        "--adaptive-draft-len",
        help="Choose the draft length by measured acceptance and cost, down to none; --draft-len "
        "is the maximum.",
    ),
]
VerifyExact = Annotated[
    bool,
    Option(
        "--verify-exact",
        help="Run every prompt again, alone without drafts; fail where outputs differ.",
    ),
]
TokenizerDir = Annotated[
    Path | None,
    Option(
        "--tokenizer-dir",
        help="Folder with tokenizer.json; default: the one stored in the engine.",
        hidden=True,
    ),
]
NumThreads = Annotated[
    int | None,
    Option("--num-threads", min=1, help="CPU threads; default: one per core.", hidden=True),
]

# ---- prompts ----

InputText = Annotated[
    list[str] | None,
    Option("--input-text", metavar="TEXT...", help='Prompts, one or several: "a" "b".'),
]
InputFile = Annotated[
    Path | None,
    Option(
        "--input-file",
        help=".txt (a prompt a line), .csv or .npy (token ids), .jsonl (objects with prompt or "
        "input_ids, and settings of their own).",
    ),
]
MaxInputLength = Annotated[
    int | None,
    Option(
        "--max-input-length",
        min=1,
        help="Keep only the last N prompt tokens. Without it nothing is cut; a prompt that does "
        "not fit is refused.",
        hidden=True,
    ),
]
Chat = Annotated[
    bool, Option("--chat", help="Prompts become user messages in the tokenizer's chat template.")
]
NoAddSpecialTokens = Annotated[
    bool, Option("--no-add-special-tokens", help="No bos token. Not with --chat.", hidden=True)
]

# ---- sampling ----

MaxOutputLen = Annotated[int, Option("--max-output-len", min=1, help="New tokens.")]
Temperature = Annotated[
    float | None,
    Option(
        "--temperature",
        help="Greedy unless this, top-k, top-p or min-p is given; 0 is greedy.",
    ),
]
TopK = Annotated[int | None, Option("--top-k", help="Most likely tokens kept; 0: all.")]
TopP = Annotated[float | None, Option("--top-p", help="Probability mass kept; 0: not used.")]
MinP = Annotated[
    float | None,
    Option(
        "--min-p",
        help="Minimum probability, relative to the most likely token's.",
        hidden=True,
    ),
]
Typical = Annotated[
    str | None,
    Option(
        "--typical-acceptance",
        help="Lossy: keep sampled drafts that the target finds likely enough; THRESHOLD,ALPHA or "
        "auto (0.09,0.3).",
        hidden=True,
    ),
]
RepetitionPenalty = Annotated[
    float,
    Option(
        "--repetition-penalty", help="Divides logits of tokens that occurred; 1: off.", hidden=True
    ),
]
PresencePenalty = Annotated[
    float,
    Option(
        "--presence-penalty",
        help="Subtracted from logits of tokens that occurred; 0: off.",
        hidden=True,
    ),
]
FrequencyPenalty = Annotated[
    float,
    Option("--frequency-penalty", help="Subtracted for each occurrence of a token.", hidden=True),
]
NoRepeatNgramSize = Annotated[
    int,
    Option(
        "--no-repeat-ngram-size",
        min=0,
        help="No sequence of N tokens occurs twice, prompt included; 0: off.",
        hidden=True,
    ),
]
RandomSeed = Annotated[
    int, Option("--random-seed", min=0, help="The same seed gives the same text.")
]
NumReturnSequences = Annotated[
    int,
    Option("--num-return-sequences", min=1, help="Outputs per prompt; output i uses seed + i."),
]
NumBeams = Annotated[int, Option("--num-beams", min=1, help="Only 1.", hidden=True)]
EndId = Annotated[
    int | None,
    Option(
        "--end-id",
        min=-1,
        help="Token that ends an output; default: the tokenizer's and the model's; -1: none.",
        hidden=True,
    ),
]
StopWords = Annotated[
    list[str] | None,
    Option(
        "--stop-words",
        metavar="TEXT...",
        help='Words that end an output: "a" "b". Once for all prompts, or once each.',
    ),
]
BadWords = Annotated[
    list[str] | None,
    Option(
        "--bad-words",
        metavar="TEXT...",
        help="Words that never appear; given like --stop-words.",
        hidden=True,
    ),
]

# ---- output ----

Streaming = Annotated[bool, Option("--streaming", help="Print the text so far as it grows.")]
StreamingInterval = Annotated[
    int | None,
    Option(
        "--streaming-interval",
        min=1,
        help="Steps between two prints of one output; default: 5.",
        hidden=True,
    ),
]
OutputCsv = Annotated[
    Path | None,
    Option(
        "--output-csv",
        callback=ending(".csv"),
        help="File of token ids, one output per line.",
        hidden=True,
    ),
]
OutputNpy = Annotated[
    Path | None,
    Option(
        "--output-npy",
        callback=ending(".npy"),
        help="File of token ids, int32 [outputs, longest], padded with the end id.",
        hidden=True,
    ),
]
OutputJsonl = Annotated[
    Path | None,
    Option(
        "--output-jsonl",
        callback=ending(*JSON_LINES),
        help="File with one JSON object per output.",
    ),
]
OutputLogProbsNpy = Annotated[
    Path | None,
    Option(
        "--output-log-probs-npy",
        callback=ending(".npy"),
        help="Log-probability of every output token, float32, padded with NaN.",
        hidden=True,
    ),
]
OutputCumLogProbsNpy = Annotated[
    Path | None,
    Option(
        "--output-cum-log-probs-npy",
        callback=ending(".npy"),
        help="Sum of each output's log-probabilities, float32 [outputs, 1].",
        hidden=True,
    ),
]
RunProfiling = Annotated[
    bool,
    Option(
        "--run-profiling",
        help="10 warm-up and 10 timed runs of the batch; prints their mean latency.",
        hidden=True,
    ),
]
LogLevelOption = Annotated[
    LogLevel, Option("--log-level", metavar="LEVEL", help="verbose, info, warning or error.")
]
Json = Annotated[bool, Option("--json", help="Print one JSON object with outputs and statistics.")]
