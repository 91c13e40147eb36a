"""`llmctl run`: engines and prompts in, text out.

Options are those of TensorRT-LLM's run.py (cli/run/options.py); those that do not apply are refused
by name (cli/refused.py). Heavy imports happen after every option has been checked.
"""

from __future__ import annotations

from typing import Any

from llmctl.cli import engine_options as engine
from llmctl.cli.argv import expand_lists
from llmctl.cli.run import options as option
from llmctl.cli.run.drafting import parse_method, with_method_options
from llmctl.cli.run.options import LogLevel
from llmctl.errors import BadConfig, Unsupported
from llmctl.runtime.schedule.admission import CapacitySchedulerPolicy

DEFAULT_STREAMING_INTERVAL = 5  # run.py's
GROUPED_LISTS = ("--stop-words", "--bad-words")  # each occurrence is a list of its own


def prepare_argv(argv: list[str]) -> list[str]:
    """run.py's list options in the form the parser knows."""
    return expand_lists(
        argv, repeated=("--input-text", "--max-attention-window-size"), grouped=GROUPED_LISTS
    )


@with_method_options
def run(
    engine_dir: option.EngineDir,
    max_output_len: option.MaxOutputLen,
    input_text: option.InputText = None,
    input_file: option.InputFile = None,
    max_input_length: option.MaxInputLength = None,
    chat: option.Chat = False,
    draft_len: option.DraftLen = None,
    adaptive_draft_len: option.AdaptiveDraftLen = False,
    verify_exact: option.VerifyExact = False,
    temperature: option.Temperature = None,
    top_k: option.TopK = None,
    top_p: option.TopP = None,
    min_p: option.MinP = None,
    typical_acceptance: option.Typical = None,
    repetition_penalty: option.RepetitionPenalty = 1.0,
    presence_penalty: option.PresencePenalty = 0.0,
    frequency_penalty: option.FrequencyPenalty = 0.0,
    no_repeat_ngram_size: option.NoRepeatNgramSize = 0,
    random_seed: option.RandomSeed = 0,
    num_return_sequences: option.NumReturnSequences = 1,
    num_beams: option.NumBeams = 1,
    end_id: option.EndId = None,
    stop_words: option.StopWords = None,
    bad_words: option.BadWords = None,
    kv_cache_enable_block_reuse: engine.EnableBlockReuse = True,
    kv_cache_free_gpu_memory_fraction: engine.FreeMemoryFraction = None,
    max_tokens_in_paged_kv_cache: engine.MaxTokens = None,
    kv_cache_host_memory_bytes: engine.HostMemoryBytes = None,
    max_attention_window_size: engine.AttentionWindows = None,
    sink_token_length: engine.SinkTokenLength = None,
    enable_chunked_context: engine.EnableChunkedContext = True,
    scheduler_policy: engine.SchedulerPolicy = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT,
    context_chunking_policy: engine.ContextChunking = None,
    max_step_ms: engine.MaxStepMs = None,
    num_threads: option.NumThreads = None,
    tp_size: engine.TpSize = None,
    rank_timeout: engine.RankTimeout = None,
    ranks_on_one_device: engine.RanksOnOneDevice = False,
    trusted_builder: engine.TrustedBuilder = None,
    tokenizer_dir: option.TokenizerDir = None,
    no_add_special_tokens: option.NoAddSpecialTokens = False,
    streaming: option.Streaming = False,
    streaming_interval: option.StreamingInterval = None,
    output_csv: option.OutputCsv = None,
    output_npy: option.OutputNpy = None,
    output_jsonl: option.OutputJsonl = None,
    output_log_probs_npy: option.OutputLogProbsNpy = None,
    output_cum_log_probs_npy: option.OutputCumLogProbsNpy = None,
    run_profiling: option.RunProfiling = False,
    log_level: option.LogLevelOption = LogLevel.info,
    as_json: option.Json = False,
    **drafting: Any,
) -> int:
    """Generate text with an engine, alone or with a draft engine.

    Outputs go to stdout, everything else to stderr. With a draft the outputs are identical to
    those without, unless acceptance by logits or --typical-acceptance is requested.

    Examples:
      llmctl run --engine-dir out/target --max-output-len 64 --input-text 'def read_lines(path):'
      llmctl run --engine-dir out/target --draft-engine out/draft --draft-len 4 --verify-exact \\
        --max-output-len 64 --input-text 'import os' 'class Stack:' --json
    """
    if num_beams != 1:
        raise Unsupported(
            f"--num-beams is {num_beams}; beam search is not available, every request has one beam"
        )
    if as_json and (streaming or run_profiling):
        option = "--streaming" if streaming else "--run-profiling"
        raise BadConfig(f"--json prints one object at the end; it cannot go with {option}")
    if run_profiling:
        given = {
            "--streaming": streaming,
            "--verify-exact": verify_exact,
            "--output-csv": output_csv,
            "--output-npy": output_npy,
            "--output-jsonl": output_jsonl,
            "--output-log-probs-npy": output_log_probs_npy,
            "--output-cum-log-probs-npy": output_cum_log_probs_npy,
        }
        refused = [option for option, value in given.items() if value]
        if refused:
            raise BadConfig(
                f"--run-profiling times the rows again and again; {refused[0]} has no effect",
                fix=f"run once without --run-profiling for {refused[0]}",
            )
    if streaming_interval is not None and not streaming:
        raise BadConfig("--streaming-interval is given without --streaming")
    from llmctl.cli.run.prompts import (
        PromptOptions,
        parse_typical,
        sampling_config,
        word_lists,
    )
    from llmctl.cli.run.result_files import Files
    from llmctl.cli.run.session import Session, SessionOptions
    from llmctl.runtime.kv_cache.attention_windows import WindowOptions
    from llmctl.runtime.open import EngineOptions

    method = parse_method(drafting, draft_len, is_adaptive=adaptive_draft_len)
    needs_log_probs = output_log_probs_npy is not None or output_cum_log_probs_npy is not None
    options = SessionOptions(
        engines=EngineOptions(
            engine_dir=engine_dir,
            method=method,
            adaptive_draft_len=adaptive_draft_len,
            free_fraction=kv_cache_free_gpu_memory_fraction,
            max_tokens=max_tokens_in_paged_kv_cache,
            host_memory_bytes=kv_cache_host_memory_bytes,
            windows=WindowOptions(tuple(max_attention_window_size or ()), sink_token_length or 0),
            enable_block_reuse=kv_cache_enable_block_reuse,
            enable_chunked_context=enable_chunked_context,
            scheduler_policy=scheduler_policy,
            context_chunking_policy=engine.chunking_policy(
                context_chunking_policy, enable_chunked_context
            ),
            max_step_ms=engine.step_target(max_step_ms),
            num_threads=num_threads,
            tp_size=tp_size,
            rank_timeout_s=rank_timeout,
            ranks_on_one_device=ranks_on_one_device,
            trusted_builder=trusted_builder,
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
                typical_acceptance=parse_typical(typical_acceptance, "--typical-acceptance"),
                seed=random_seed,
                repetition_penalty=repetition_penalty,
                presence_penalty=presence_penalty,
                frequency_penalty=frequency_penalty,
                no_repeat_ngram_size=no_repeat_ngram_size,
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
