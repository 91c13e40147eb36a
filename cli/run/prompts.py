"""From prompts and options to the executor's requests."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from llmctl.builder.engine_format import EngineConfig, LookaheadDecodingConfig
from llmctl.cli.run.generate import Row
from llmctl.cli.run.text_io import Prompt, read_prompts
from llmctl.cli.tokenizer import Tokenizer
from llmctl.errors import BadConfig, LlmctlError
from llmctl.runtime.request import OutputConfig, Request, SamplingConfig, TypicalAcceptance
from llmctl.runtime.schedule.admission import check_token_ids, refuse_long_prompt

SAMPLE_PROMPT = "The quick brown fox"  # used when neither text nor file is given, as run.py does

_NUMBER = re.compile(r"[0-9]{0,20}\.?[0-9]{1,20}")

Words = tuple[tuple[str, ...], ...]  # one tuple for all rows, or one per row


@dataclass(frozen=True, slots=True)
class PromptOptions:
    """What the command line says about all rows; a .jsonl row may override its part."""

    max_output_len: int
    input_text: tuple[str, ...] = ()
    input_file: Path | None = None
    max_input_length: int | None = None
    is_chat: bool = False
    add_special_tokens: bool = True
    end_id: int | None = None
    stop_words: Words = ()
    bad_words: Words = ()
    needs_log_probs: bool = False
    sampling: SamplingConfig = field(default_factory=SamplingConfig)


def sampling_config(
    *,
    temperature: float | None,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
    **others: Any,
) -> SamplingConfig:
    """Greedy unless one of the four is given; then top_k 0, meaning all tokens, is the default.

    run.py keeps top_k 1 unless told otherwise, so that a temperature alone changes nothing there.
    """
    if temperature is None and top_k is None and not top_p and not min_p:
        return SamplingConfig(**others)
    config = SamplingConfig(
        temperature=1.0 if temperature is None else temperature,
        top_k=0 if top_k is None else top_k,
        top_p=top_p or None,  # run.py's 0.0 stands for "not used"
        min_p=min_p or 0.0,
        **others,
    )
    if temperature == 0:
        _refuse_filters({"--top-k": top_k, "--top-p": top_p, "--min-p": min_p}, "--temperature")
    return config


def _refuse_filters(given: Mapping[str, float | None], temperature: str) -> None:
    """Raise BadConfig where tokens to draw from are named beside a temperature of 0, which draws
    none. Values that exclude nothing may be there, and a top_k of 1, which is greedy, too."""
    for name, value in given.items():
        if value and value != 1:
            raise BadConfig(
                f"{temperature} 0 takes the likeliest token, so {name} {value} has no effect",
                fix=f"leave out {name} for greedy decoding, or raise {temperature} to sample",
            )


def parse_typical(text: str | None, option: str) -> TypicalAcceptance | None:
    """The value of --typical-acceptance, or of the key in a row. Raises BadConfig."""
    if text is None:
        return None
    if text == "auto":
        return TypicalAcceptance()
    parts = text.split(",")
    if len(parts) != 2 or not all(map(_NUMBER.fullmatch, parts)):
        raise BadConfig(
            f"{option} is {text[:100]!r}; it must be THRESHOLD,ALPHA, such as 0.09,0.3, or auto"
        )
    return TypicalAcceptance(*map(float, parts))


def word_lists(options: Sequence[str] | None) -> Words:
    """--stop-words and --bad-words: each occurrence is a JSON list (see cli/argv.py)."""
    return tuple(tuple(json.loads(option)) for option in options or ())


def read_all(options: PromptOptions) -> list[Prompt]:
    """The prompts, and a check that word lists match their number. Raises BadConfig."""
    if options.input_text and options.input_file is not None:
        raise BadConfig("--input-text and --input-file are both given; one of them is wanted")
    if options.input_file is not None:
        prompts = read_prompts(options.input_file)
    else:
        prompts = [Prompt(text=text) for text in options.input_text or (SAMPLE_PROMPT,)]
    if options.is_chat and not options.add_special_tokens:
        raise BadConfig(
            "--no-add-special-tokens is about prompts as they are; --chat puts them into a "
            "template that has its own",
            fix="leave one of the two out",
        )
    if options.is_chat and any(prompt.text is None for prompt in prompts):
        raise BadConfig(
            f"--chat puts text into the chat template; {options.input_file} has token ids",
            fix="leave --chat out, or give the prompts as text",
        )
    for text in options.input_text:
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise BadConfig(f"--input-text {text!r} is not UTF-8 text")
    for name, words in (("--stop-words", options.stop_words), ("--bad-words", options.bad_words)):
        if not all(word for occurrence in words for word in occurrence):
            raise BadConfig(f"{name} holds an empty word")
        if len(words) not in (0, 1, len(prompts)):
            raise BadConfig(
                f"{name} is given {len(words)} times for {len(prompts)} "
                f"prompt{'' if len(prompts) == 1 else 's'}; it must be given once, or once per "
                "prompt"
            )
    return prompts


def make_rows(
    prompts: Sequence[Prompt],
    options: PromptOptions,
    tokenizer: Tokenizer,
    model_end_ids: Sequence[int],
) -> list[Row]:
    """A row per prompt; one that cannot become a request carries the error instead. Raises
    TokenizerError where --chat has no template for any.

    `model_end_ids` are those of the model's configuration, which end an output beside the
    tokenizer's unless --end-id is given.
    """
    rows = []
    chats: Sequence[list[int] | LlmctlError | None] = [None] * len(prompts)
    if options.is_chat:
        chats = tokenizer.chat_prompts([prompt.text or "" for prompt in prompts])
    for index, (prompt, chat) in enumerate(zip(prompts, chats, strict=True)):
        row = Row(index, prompt.text or "")
        try:
            ids = _token_ids(prompt, chat, options, tokenizer)
            if prompt.text is None or len(ids) == options.max_input_length:
                row.prompt = tokenizer.decode(ids)
            row.request = _request(index, prompt, ids, options, tokenizer, model_end_ids)
        except LlmctlError as error:
            row.error = error
        rows.append(row)
    return rows


def refuse_rows(rows: Sequence[Row], config: EngineConfig) -> bool:
    """Give rows that the engine cannot run, whatever its memory, the error that its executor would
    give them. True where none is left."""
    for row in rows:
        if row.request is not None:
            try:
                check_token_ids(row.request, config.pretrained_config["vocab_size"])
                refuse_long_prompt(
                    len(row.request.input_token_ids), config.build_config["max_seq_len"]
                )
            except LlmctlError as error:
                row.error = error
    return all(row.error is not None for row in rows)


def _token_ids(
    prompt: Prompt,
    chat: list[int] | LlmctlError | None,
    options: PromptOptions,
    tokenizer: Tokenizer,
) -> tuple[int, ...]:
    if isinstance(chat, LlmctlError):
        raise chat
    if chat is not None:
        ids = chat
    elif prompt.token_ids is not None:
        ids = list(prompt.token_ids)
    else:
        ids = tokenizer.encode(prompt.text or "", add_special_tokens=options.add_special_tokens)
    if options.max_input_length is not None:
        ids = ids[-options.max_input_length :]
    return tuple(ids)


def _request(
    index: int,
    prompt: Prompt,
    ids: tuple[int, ...],
    options: PromptOptions,
    tokenizer: Tokenizer,
    model_end_ids: Sequence[int],
) -> Request:
    settings = dict(prompt.settings)
    end_id: int | None = tokenizer.end_id
    further: list[int] = []
    if options.end_id is not None:
        end_id = options.end_id if options.end_id >= 0 else None
    else:
        further = [item for item in model_end_ids if item != end_id]
        if end_id is None and further:
            end_id = further.pop(0)
    stop = _words(settings.pop("stop_words", None), options.stop_words, index, tokenizer)
    bad = _words(settings.pop("bad_words", None), options.bad_words, index, tokenizer)
    priority, window = settings.pop("priority", 0.5), row_window(settings)
    return Request(
        input_token_ids=ids,
        max_tokens=settings.pop("max_tokens", options.max_output_len),
        sampling_config=row_sampling(options.sampling, settings),
        output_config=OutputConfig(return_log_probs=options.needs_log_probs),
        streaming=True,  # the time to the first token is part of every report
        end_id=end_id,
        further_end_ids=tuple(further),
        stop_words=stop,
        bad_words=bad,
        priority=priority,
        lookahead_config=window,
    )


def row_window(settings: dict[str, Any]) -> LookaheadDecodingConfig | None:
    """Takes the row's own lookahead_config out of its settings. Raises BadConfig."""
    sizes = settings.pop("lookahead_config", None)
    return None if sizes is None else LookaheadDecodingConfig.of(sizes, "lookahead_config")


def row_sampling(base: SamplingConfig, settings: Mapping[str, Any]) -> SamplingConfig:
    """The row's own fields over the command line's, greedy by the same rule."""
    changed = dict(settings)
    if changed.keys() & {"temperature", "top_p", "min_p"} and base.top_k is None:
        changed.setdefault("top_k", 0)
    if changed.get("top_p") == 0:
        changed["top_p"] = None
    if "typical_acceptance" in changed:
        rule = parse_typical(changed["typical_acceptance"], "typical_acceptance")
        changed["typical_acceptance"] = rule
    config = replace(base, **changed)
    if settings.get("temperature") == 0:  # filters of the command line are for other rows
        _refuse_filters(
            {key: settings.get(key) for key in ("top_k", "top_p", "min_p")}, "temperature"
        )
    return config


def _words(
    own: Sequence[str] | None, common: Words, index: int, tokenizer: Tokenizer
) -> tuple[tuple[int, ...], ...]:
    """Token ids of a row's words: its own, or the command line's."""
    words: Sequence[str] = own if own is not None else ()
    if own is None and common:
        words = common[index] if len(common) > 1 else common[0]
    return tuple(tuple(tokenizer.encode(word, add_special_tokens=False)) for word in words)
