"""The requests of a benchmark: a dataset's rows, or random prompts of one length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from llmctl.builder.engine_format import TOKENIZER_FOLDER, EngineConfig
from llmctl.builder.tokenizer import TOKENIZER_FILE
from llmctl.cli.dataset.command import ENDINGS
from llmctl.cli.run.prompts import row_sampling, row_window
from llmctl.cli.run.text_io import Prompt, read_prompts
from llmctl.errors import BadConfig, PromptTooLong
from llmctl.quantize.format import has_file
from llmctl.runtime.request import Request, SamplingConfig

if TYPE_CHECKING:
    from llmctl.cli.tokenizer import Tokenizer

DEFAULT_INPUT_LEN = 128
DEFAULT_OUTPUT_LEN = 128
DEFAULT_NUM_REQUESTS = 10  # without a dataset


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """The requests. num_requests 0: the whole dataset, or DEFAULT_NUM_REQUESTS random prompts.

    eos_id -1: every output has exactly the requested number of tokens. has_windows False: without
    the rows' own lookahead_config.
    """

    dataset: Path | None = None
    num_requests: int = 0
    input_len: int | None = None
    output_len: int | None = None
    eos_id: int = -1
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    has_windows: bool = True

    def __post_init__(self) -> None:
        if self.dataset is not None and self.input_len is not None:
            raise BadConfig(
                "--dataset and --target-input-len are both given; the dataset has its own prompts"
            )


def read_load(options: LoadOptions) -> list[Prompt]:
    """The dataset's rows; nothing without a dataset. Raises BadConfig."""
    if options.dataset is None:
        return []
    if options.dataset.suffix.lower() not in ENDINGS:
        raise BadConfig(
            f"--dataset is {options.dataset}; a {' or '.join(ENDINGS)} file of JSON lines "
            "is wanted",
            fix="make one with: llmctl dataset --tokenizer ENGINE_DIR --output FILE.jsonl ...",
        )
    if options.dataset.is_file() and options.dataset.stat().st_size == 0:
        raise BadConfig(
            f"--dataset {options.dataset} is empty, as `> {options.dataset.name}` leaves it where "
            "the command before it printed nothing",
            fix=f"llmctl dataset --tokenizer ENGINE_DIR ... > {options.dataset}, and see that it "
            "ends without an error",
        )
    prompts = read_prompts(options.dataset, "--dataset", suffix=".jsonl")
    if options.num_requests > len(prompts):
        raise BadConfig(
            f"--num-requests is {options.num_requests}; {options.dataset} has {len(prompts)} rows"
        )
    return prompts[: options.num_requests or None]


def make_requests(
    options: LoadOptions, prompts: Sequence[Prompt], engine_dir: Path, config: EngineConfig
) -> list[Request]:
    """The requests, all of which fit the engine. Raises BadConfig or PromptTooLong, naming the row.

    Responses are streamed, or there would be no time of a first token.
    """
    vocab_size = config.pretrained_config["vocab_size"]
    if options.eos_id >= vocab_size:
        raise BadConfig(f"--eos-id is {options.eos_id}; the engine's ids are 0 to {vocab_size - 1}")
    if options.dataset is None:
        prompts = _random_prompts(options, engine_dir, config)
    tokenizer: Tokenizer | None = None
    if any(prompt.token_ids is None for prompt in prompts):
        from llmctl.cli.tokenizer import engine_tokenizer

        tokenizer = engine_tokenizer(engine_dir, config, "")
    has_all = options.dataset is not None and all("max_tokens" in p.settings for p in prompts)
    if options.output_len is not None and has_all:
        raise BadConfig(
            f"--target-output-len is {options.output_len}, and every row of {options.dataset} says "
            "how many tokens it wants",
            fix="leave --target-output-len out, or take output_tokens out of the rows",
        )
    requests = []
    for index, prompt in enumerate(prompts):
        try:
            request = _request(options, prompt, tokenizer)
        except BadConfig as error:
            error.args = (f"row {index} of {options.dataset}: {error}",)
            raise
        _require_fit(request, index, config)
        requests.append(request)
    return requests


def _request(options: LoadOptions, prompt: Prompt, tokenizer: Tokenizer | None) -> Request:
    """The request of a row. Raises BadConfig."""
    ids = prompt.token_ids
    if ids is None:
        assert tokenizer is not None
        ids = tuple(tokenizer.encode(prompt.text or ""))
    settings = dict(prompt.settings)
    for name in ("stop_words", "bad_words", "typical_acceptance"):
        if name in settings:
            raise BadConfig(f"it has {name}; a benchmark has not")
    num_tokens = settings.pop("max_tokens", options.output_len)
    priority, window = settings.pop("priority", 0.5), row_window(settings)
    if num_tokens is None:
        raise BadConfig(
            "it has no output_tokens", fix="add it, or give --target-output-len for all rows"
        )
    return Request(
        input_token_ids=ids,
        max_tokens=num_tokens,
        sampling_config=row_sampling(options.sampling, settings),
        streaming=True,
        end_id=options.eos_id if options.eos_id >= 0 else None,
        priority=priority,
        lookahead_config=window if options.has_windows else None,
    )


def _require_fit(request: Request, index: int, config: EngineConfig) -> None:
    """Rows that are too long are refused before anything runs, as in trtllm-bench: cutting them
    would change what is measured."""
    _require_room(len(request.input_token_ids), request.max_tokens, index, config)
    vocab = int(config.pretrained_config["vocab_size"])
    largest = max(request.input_token_ids)
    if largest >= vocab:
        raise BadConfig(
            f"row {index} has token id {largest}; the engine's ids are 0 to {vocab - 1}",
            fix="make the dataset with --tokenizer ENGINE_DIR",
        )


def _require_room(
    num_prompt_tokens: int, max_tokens: int, index: int, config: EngineConfig
) -> None:
    room = int(config.build_config["max_seq_len"])
    if num_prompt_tokens + max_tokens > room:
        raise PromptTooLong(
            f"row {index} has {num_prompt_tokens} prompt tokens and requests {max_tokens}; the "
            f"engine's max_seq_len is {room}",
            fix="use shorter rows, or rebuild the engine with a larger --max-seq-len",
        )


def _random_prompts(options: LoadOptions, engine_dir: Path, config: EngineConfig) -> list[Prompt]:
    length = options.input_len or DEFAULT_INPUT_LEN
    settings = {"max_tokens": options.output_len or DEFAULT_OUTPUT_LEN}
    _require_room(length, settings["max_tokens"], 0, config)  # before any of them is drawn
    generator = np.random.default_rng(options.sampling.seed)
    ordinary = np.array(_ordinary_ids(engine_dir, config), np.int64)
    return [
        Prompt(
            token_ids=tuple(ordinary[generator.integers(0, len(ordinary), length)].tolist()),
            settings=settings,
        )
        for _ in range(options.num_requests or DEFAULT_NUM_REQUESTS)
    ]


def _ordinary_ids(engine_dir: Path, config: EngineConfig) -> Sequence[int]:
    """Ids of ordinary tokens, as far as the engine can tell."""
    planted: list[int] | None = config.weights.get("ordinary_tokens")
    if planted is not None:
        return range(*planted)
    vocab = int(config.pretrained_config["vocab_size"])
    folder = engine_dir / TOKENIZER_FOLDER
    if not has_file(folder / TOKENIZER_FILE):
        return range(vocab)
    from llmctl.cli.tokenizer import Tokenizer

    return [item for item in Tokenizer(folder, "").ordinary_ids if item < vocab]
