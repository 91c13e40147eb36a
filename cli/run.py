"""`llmctl run`: engines and prompts in, text out.

Options are those of TensorRT-LLM's run.py; those that do not apply are refused by name
(cli/refused.py). Heavy imports happen after every option has been checked.
"""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer

from llmctl.cli.argv import expand_lists
from llmctl.errors import BadConfig, Unsupported

DEFAULT_STREAMING_INTERVAL = 5  # run.py's


class LogLevel(enum.StrEnum):
    """run.py's levels; each shows itself and what follows."""

    verbose = "verbose"
    info = "info"
    warning = "warning"
    error = "error"
    internal_error = "internal_error"


def prepare_argv(argv: list[str]) -> list[str]:
    """run.py's list options in the form the parser knows."""
    return expand_lists(argv, repeated=("--input-text",), grouped=("--stop-words", "--bad-words"))


def run(
    engine_dir: Annotated[
        Path,
        typer.Option("--engine-dir", help="The (target) engine."),
    ],
    max_output_len: Annotated[
        int,
        typer.Option("--max-output-len", min=1, help="New tokens."),
    ],
    input_text: Annotated[
        list[str] | None,
        typer.Option("--input-text", help='Prompts, one or several: "a" "b".'),
    ] = None,
    input_file: Annotated[
        Path | None,
        typer.Option(
            "--input-file",
            help=".txt (a prompt a line), .csv or .npy (token ids), .jsonl (objects with prompt or "
            "input_ids, and settings of their own).",
        ),
    ] = None,
    max_input_length: Annotated[
        int | None,
        typer.Option(
            "--max-input-length",
            min=1,
            help="Keep only the last N prompt tokens. Without it nothing is cut; a prompt that "
            "does not fit is refused.",
        ),
    ] = None,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat",
            help="Prompts become user messages in the tokenizer's chat template.",
        ),
    ] = False,
    streaming: Annotated[
        bool,
        typer.Option("--streaming", help="Print the text so far as it grows."),
    ] = False,
    streaming_interval: Annotated[
        int | None,
        typer.Option(
            "--streaming-interval",
            min=1,
            help="Steps between two prints of one output; default: 5.",
        ),
    ] = None,
    output_csv: Annotated[
        Path | None,
        typer.Option("--output-csv", help="Token ids, a line each."),
    ] = None,
    output_npy: Annotated[
        Path | None,
        typer.Option(
            "--output-npy",
            help="Token ids, int32 [outputs, longest], padded with the end id.",
        ),
    ] = None,
    output_jsonl: Annotated[
        Path | None,
        typer.Option("--output-jsonl", help="One object an output."),
    ] = None,
    output_log_probs_npy: Annotated[
        Path | None,
        typer.Option(
            "--output-log-probs-npy",
            help="Log-probability of every output token, float32, padded with NaN.",
        ),
    ] = None,
    output_cum_log_probs_npy: Annotated[
        Path | None,
        typer.Option(
            "--output-cum-log-probs-npy",
            help="Sum of each output's log-probabilities, float32 [outputs, 1].",
        ),
    ] = None,
    tokenizer_dir: Annotated[
        Path | None,
        typer.Option(
            "--tokenizer-dir",
            help="Folder with tokenizer.json; default: the one stored in the engine.",
        ),
    ] = None,
    no_add_special_tokens: Annotated[
        bool,
        typer.Option("--no-add-special-tokens", help="No bos token, no template."),
    ] = False,
    temperature: Annotated[
        float | None,
        typer.Option(
            "--temperature",
            help="Greedy unless one of temperature, top-k, top-p, min-p is given; 0 is greedy.",
        ),
    ] = None,
    top_k: Annotated[
        int | None,
        typer.Option("--top-k", help="Most likely tokens kept; 0: all."),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option("--top-p", help="Probability mass kept; 0: not used."),
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option(
            "--min-p",
            help="Least probability kept, as a share of the most likely token's.",
        ),
    ] = None,
    repetition_penalty: Annotated[float, typer.Option("--repetition-penalty")] = 1.0,
    presence_penalty: Annotated[float, typer.Option("--presence-penalty")] = 0.0,
    frequency_penalty: Annotated[float, typer.Option("--frequency-penalty")] = 0.0,
    random_seed: Annotated[int, typer.Option("--random-seed", min=0)] = 0,
    num_return_sequences: Annotated[
        int,
        typer.Option(
            "--num-return-sequences",
            min=1,
            help="Outputs per prompt; output i uses seed + i.",
        ),
    ] = 1,
    num_beams: Annotated[int, typer.Option("--num-beams", min=1, help="Only 1.")] = 1,
    end_id: Annotated[
        int | None,
        typer.Option(
            "--end-id",
            min=-1,
            help="Token that ends an output; default: the tokenizer's and the model's; -1: none.",
        ),
    ] = None,
    stop_words: Annotated[
        list[str] | None,
        typer.Option(
            "--stop-words",
            help='Words that end an output: "a" "b". Once for all prompts, or once each.',
        ),
    ] = None,
    bad_words: Annotated[
        list[str] | None,
        typer.Option(
            "--bad-words",
            help="Words that never appear; given like --stop-words.",
        ),
    ] = None,
    draft_engine: Annotated[
        Path | None,
        typer.Option(
            "--draft-engine",
            "--draft-engine-dir",
            help="Engine of the draft model.",
        ),
    ] = None,
    draft_len: Annotated[
        int | None,
        typer.Option(
            "--draft-len",
            help="Draft tokens a round; default: the max_draft_len of the target engine.",
        ),
    ] = None,
    draft_target_model_config: Annotated[
        str | None,
        typer.Option(
            "--draft-target-model-config",
            help='"[draft_len,[draft devices],[target devices],use_logits]", as in '
            '"[4,[0],[0],False]".',
        ),
    ] = None,
    ngram_config: Annotated[
        str | None,
        typer.Option(
            "--ngram-config",
            "--prompt-lookup-config",
            help='Draft from the text itself: "[draft_len,max_ngram,[devices]]", as in '
            '"[10,2,[0]]".',
        ),
    ] = None,
    verify_exact: Annotated[
        bool,
        typer.Option(
            "--verify-exact",
            help="Also run every prompt alone without drafts; fail where the outputs differ.",
        ),
    ] = False,
    kv_cache_enable_block_reuse: Annotated[
        bool,
        typer.Option(
            "--kv-cache-enable-block-reuse/--no-kv-cache-enable-block-reuse",
            help="Keep KV blocks of shared prefixes.",
        ),
    ] = True,
    kv_cache_free_gpu_memory_fraction: Annotated[
        float | None,
        typer.Option(
            "--kv-cache-free-gpu-memory-fraction",
            help="Upper bound of both KV caches, as a share of the memory that weights and "
            "activations leave free; default 0.9 on a GPU, 0.5 of RAM for cpu engines.",
        ),
    ] = None,
    max_tokens_in_paged_kv_cache: Annotated[
        int | None,
        typer.Option(
            "--max-tokens-in-paged-kv-cache",
            min=1,
            help="Upper bound of the KV cache in tokens; the smaller bound counts.",
        ),
    ] = None,
    enable_chunked_context: Annotated[
        bool,
        typer.Option(
            "--enable-chunked-context/--no-enable-chunked-context",
            help="Long prompts enter in chunks beside running requests.",
        ),
    ] = True,
    max_step_ms: Annotated[
        float | None,
        typer.Option(
            "--max-step-ms",
            help="Shrink prompt chunks until a step takes no longer; default: largest chunks.",
        ),
    ] = None,
    num_threads: Annotated[
        int | None,
        typer.Option(
            "--num-threads",
            min=1,
            help="CPU threads; default: one per core.",
        ),
    ] = None,
    run_profiling: Annotated[
        bool,
        typer.Option(
            "--run-profiling",
            help="10 warm-up and 10 timed runs of the batch; prints their mean latency.",
        ),
    ] = False,
    log_level: Annotated[LogLevel, typer.Option("--log-level")] = LogLevel.info,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print one JSON object with outputs and statistics.",
        ),
    ] = False,
) -> int:
    """Generate text with an engine, alone or with a draft engine.

    Outputs go to stdout, everything else to stderr. With a draft the outputs are identical to
    those without.
    """
    if num_beams != 1:
        raise Unsupported(
            f"--num-beams is {num_beams}; beam search is not available, every request has one beam"
        )
    if as_json and (streaming or run_profiling):
        option = "--streaming" if streaming else "--run-profiling"
        raise BadConfig(f"--json prints one object at the end; it cannot go with {option}")
    if streaming_interval is not None and not streaming:
        raise BadConfig("--streaming-interval is given without --streaming")
    from llmctl.cli.engines import EngineOptions
    from llmctl.cli.prompts import PromptOptions, sampling_config, word_lists
    from llmctl.cli.session import Files, Session, SessionOptions
    from llmctl.cli.speculation import parse_speculation

    speculation = parse_speculation(
        draft_engine, draft_target_model_config, draft_len, ngram_config
    )
    needs_log_probs = output_log_probs_npy is not None or output_cum_log_probs_npy is not None
    options = SessionOptions(
        engines=EngineOptions(
            engine_dir=engine_dir,
            speculation=speculation,
            free_fraction=kv_cache_free_gpu_memory_fraction,
            max_tokens=max_tokens_in_paged_kv_cache,
            enable_block_reuse=kv_cache_enable_block_reuse,
            enable_chunked_context=enable_chunked_context,
            max_step_ms=max_step_ms,
            num_threads=num_threads,
        ),
        prompts=PromptOptions(
            input_text=tuple(input_text or ()),
            input_file=input_file,
            max_output_len=max_output_len,
            max_input_length=max_input_length,
            is_chat=chat,
            add_special_tokens=not no_add_special_tokens,
            end_id=end_id,
            stop_words=word_lists(stop_words),
            bad_words=word_lists(bad_words),
            needs_log_probs=needs_log_probs,
            sampling=sampling_config(
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                min_p=min_p,
                seed=random_seed,
                repetition_penalty=repetition_penalty,
                presence_penalty=presence_penalty,
                frequency_penalty=frequency_penalty,
                num_return_sequences=num_return_sequences,
            ),
        ),
        files=Files(
            csv=output_csv,
            npy=output_npy,
            jsonl=output_jsonl,
            log_probs_npy=output_log_probs_npy,
            cum_log_probs_npy=output_cum_log_probs_npy,
        ),
        tokenizer_dir=tokenizer_dir,
        streaming_interval=(streaming_interval or DEFAULT_STREAMING_INTERVAL)
        if streaming
        else None,
        is_profiling=run_profiling,
        is_verifying=verify_exact,
        is_json=as_json,
        log_level=log_level.value,
    )
    return Session(options).run()
