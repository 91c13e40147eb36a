"""One `llmctl run` from checked options to exit code."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, fields, replace
from pathlib import Path

from llmctl.builder.engine_format import EngineConfig
from llmctl.cli.output_files import require_writable
from llmctl.cli.run.acceptance import check_rules, idle_copies, idle_rule, rules
from llmctl.cli.run.drafting import require_drafts
from llmctl.cli.run.generate import Row, generate
from llmctl.cli.run.output import StreamPrinter, print_rows, row_fix, run_json
from llmctl.cli.run.prompts import PromptOptions, make_rows, read_all, refuse_rows
from llmctl.cli.run.report import LOG_LEVELS, RunStats, engine_lines, stats_lines, summarize
from llmctl.cli.run.result_files import Files, ResultFiles
from llmctl.cli.run.results import Results
from llmctl.cli.streams import LateStream, results_on_stdout
from llmctl.cli.tokenizer import Tokenizer, engine_tokenizer, tokenizer_hash
from llmctl.errors import BadConfig, ExactnessViolation, LlmctlError, RankFailure
from llmctl.runtime.open import CheckedEngines, EngineOptions, OpenEngines, check_engines
from llmctl.runtime.ranks.serve import serve_rank
from llmctl.runtime.stats.counters import SpeculationStats

BATCHES_IN_FLIGHT = 4  # requests with the executor, in batches of the target: none is ever short
NUM_PROFILING_RUNS = 10  # warm-up runs, and timed runs after them, as in run.py


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """Everything the command line said. streaming_interval None: print at the end."""

    engines: EngineOptions
    prompts: PromptOptions
    files: Files = Files()
    tokenizer_dir: Path | None = None
    streaming_interval: int | None = None
    is_profiling: bool = False
    is_verifying: bool = False
    is_json: bool = False
    log_level: str = "info"

    def __post_init__(self) -> None:
        if self.is_verifying:
            require_drafts(
                "--verify-exact compares decoding with and without drafts, and there are none",
                self.engines.method,
            )


class Session:
    """Runs once: check everything that needs no weights, load, generate, write, print."""

    def __init__(self, options: SessionOptions) -> None:
        self._options = options
        files = (getattr(options.files, item.name) for item in fields(options.files))
        self._paths = [path for path in files if path is not None]
        self._stdout = LateStream(sys.stdout, has_files=bool(self._paths))

    def run(self) -> int:
        """The exit code: 1 when any row failed or was refused. Named errors are raised."""
        options = self._options
        code = serve_rank(options.engines)
        if code is not None:
            return code
        require_writable(*self._paths, source=options.prompts.input_file)
        prompts = read_all(options.prompts)
        checked = check_engines(options.engines)
        tokenizer = self._tokenizer(checked.target)
        end_id, vocab_size = options.prompts.end_id, checked.target.pretrained_config["vocab_size"]
        if end_id is not None and end_id >= vocab_size:
            raise BadConfig(f"--end-id is {end_id}; the engine's ids are 0 to {vocab_size - 1}")
        rows = make_rows(prompts, options.prompts, tokenizer, _model_end_ids(checked.target))
        check_rules(options.engines.method, rows, is_verifying=options.is_verifying)
        asked = [row.request for row in rows if row.request]
        for idle in (idle_rule(options.engines.method, asked), idle_copies(asked)):
            if idle is not None and asked:
                self._log("warning", idle)
        if refuse_rows(rows, checked.target):
            return self._end_without_engines(rows, tokenizer, checked)
        with closing(OpenEngines(checked, lambda lines: self._log("info", *lines))) as engines:
            return self._use(engines, rows, tokenizer)

    def _use(self, engines: OpenEngines, rows: list[Row], tokenizer: Tokenizer) -> int:
        """The part of `run` for which weights are loaded."""
        options = self._options
        self._log("info", *engine_lines(engines, is_verbose=self._is_shown("verbose")))
        if options.is_profiling:
            self._profile(engines, rows)
            return _exit_code(rows)
        with self._files(rows, tokenizer) as files:
            stats = self._generate(engines, rows, tokenizer, files)
        with results_on_stdout():
            self._print_object(rows, tokenizer, stats)
            self._raise_failures(files)
            self._log("info", *stats_lines(stats))
            self._report_rows(rows, engines.target.max_seq_len)
            if options.is_verifying:
                self._verify(engines, rows)
            return _exit_code(rows)

    def _end_without_engines(
        self, rows: list[Row], tokenizer: Tokenizer, checked: CheckedEngines
    ) -> int:
        """Every row has its error, so weights would be loaded for nothing."""
        if not self._options.is_profiling:
            stats = summarize(rows, 0.0, checked.draft_len, SpeculationStats())
            with self._files(rows, tokenizer) as files:
                self._results(rows, tokenizer, files).hand_on()
            with results_on_stdout():
                self._print_object(rows, tokenizer, stats)
                self._raise_failures(files)
        self._report_rows(rows, checked.target.build_config["max_seq_len"])
        return _exit_code(rows)

    def _files(self, rows: Sequence[Row], tokenizer: Tokenizer) -> ResultFiles:
        return ResultFiles(
            self._options.files, tokenizer, rows, lambda line: self._log("error", line)
        )

    def _results(self, rows: Sequence[Row], tokenizer: Tokenizer, files: ResultFiles) -> Results:
        """To stdout first: outputs are shown even if a disk is full."""
        options = self._options
        is_shown = not options.is_json and options.streaming_interval is None
        return Results(
            rows,
            *([lambda row: print_rows([row], tokenizer, self._stdout)] if is_shown else []),
            files.add,
            keeps_tokens=options.is_json or options.is_verifying,
        )

    def _tokenizer(self, target: EngineConfig) -> Tokenizer:
        """The engine's own tokenizer, or the requested one, with a warning if its content
        differs."""
        folder = self._options.tokenizer_dir
        if folder is None:
            return engine_tokenizer(self._options.engines.engine_dir, target)
        tokenizer = Tokenizer(folder)
        if target.tokenizer["hash"] not in (None, tokenizer_hash(folder)):
            self._log(
                "warning",
                f"the tokenizer in {folder} differs from the one the engine was built with",
            )
        return tokenizer

    def _generate(
        self, engines: OpenEngines, rows: list[Row], tokenizer: Tokenizer, files: ResultFiles
    ) -> RunStats:
        interval = self._options.streaming_interval
        listener = None
        if interval is not None:
            listener = StreamPrinter(tokenizer, interval, self._stdout)
        with engines.executor() as executor:
            total_s = generate(
                executor,
                rows,
                listener,
                max_in_flight=BATCHES_IN_FLIGHT * engines.target.max_batch_size,
                hand_on=self._results(rows, tokenizer, files).hand_on,
            )
            speculation = executor.get_speculation_stats()
            steps = executor.get_latest_iteration_stats()
        kv_cache = steps[-1].kv_cache_stats if steps else None
        accepted_by = rules(self._options.engines.method, rows)
        return summarize(
            rows, total_s, engines.checked.draft_len, speculation, kv_cache, accepted_by
        )

    def _profile(self, engines: OpenEngines, rows: list[Row]) -> None:
        latencies_s = []
        for row in rows:
            if row.request is not None:
                row.request = replace(row.request, streaming=False)
        with engines.executor() as executor:
            for _ in range(2 * NUM_PROFILING_RUNS):
                latencies_s.append(generate(executor, rows))
        self._report_rows(rows, engines.target.max_seq_len)
        if self._options.engines.enable_block_reuse:
            self._log(
                "info",
                "prompts come from the KV cache after the first run; measure them with "
                "--no-kv-cache-enable-block-reuse",
            )
        num_rows = sum(row.error is None for row in rows)
        mean_s = sum(latencies_s[NUM_PROFILING_RUNS:]) / NUM_PROFILING_RUNS
        print(f"batch_size: {num_rows}, mean latency of {NUM_PROFILING_RUNS} runs: {mean_s:.6f} s")

    def _verify(self, engines: OpenEngines, rows: Sequence[Row]) -> None:
        """Each finished row again, alone and without drafts. Raises ExactnessViolation."""
        done = [row for row in rows if row.error is None]
        with engines.executor(is_speculative=False) as executor:
            for row in done:
                request = row.request
                plain = Row(row.index, row.prompt, request and request.without_window())
                generate(executor, [plain])
                if plain.error is not None:
                    raise plain.error
                _compare(row, plain)
        num_tokens = sum(row.num_new_tokens for row in done)
        self._log("info", f"exact: {num_tokens} tokens equal plain decoding, each prompt alone")

    def _raise_failures(self, files: ResultFiles) -> None:
        files.raise_failure()
        self._stdout.raise_failure()

    def _print_object(self, rows: Sequence[Row], tokenizer: Tokenizer, stats: RunStats) -> None:
        """Of --json. It is whole or not there, so it has to wait for the last prompt."""
        if self._options.is_json:
            print(run_json(rows, tokenizer, stats.to_json()), flush=True)

    def _report_rows(self, rows: Sequence[Row], max_seq_len: int) -> None:
        """Print failures, and outputs that were cut for lack of room before their own limit."""
        lost = next((row.error for row in rows if isinstance(row.error, RankFailure)), None)
        if lost is not None:  # of all rows that had not finished
            self._log("error", f"error[{lost.name}]: {lost}", f"fix: {lost.fix}")
        for row in rows:
            if isinstance(row.error, RankFailure):
                continue
            if isinstance(row.error, LlmctlError):
                self._log("error", f"error[{row.error.name}]: Text {row.index}: {row.error}")
                self._log("error", f"fix: {row_fix(row.error)}")
            elif row.error is None and row.request is not None:
                room = max_seq_len - len(row.request.input_token_ids)
                longest = max(item.num_tokens for item in row.sequences)
                if longest == room < row.request.max_tokens:
                    self._log(
                        "warning",
                        f"Text {row.index}: its limit of {row.request.max_tokens} tokens was cut "
                        f"to {room} by the engine's max_seq_len {max_seq_len}",
                    )

    def _is_shown(self, level: str) -> bool:
        return LOG_LEVELS.index(level) >= LOG_LEVELS.index(self._options.log_level)

    def _log(self, level: str, *lines: str) -> None:
        if self._is_shown(level):
            print("\n".join(lines), file=sys.stderr, flush=True)


def _compare(row: Row, plain: Row) -> None:
    for index, (found, wanted) in enumerate(zip(row.sequences, plain.sequences, strict=True)):
        if found.token_ids == wanted.token_ids:
            continue
        pairs = zip(found.token_ids, wanted.token_ids, strict=False)
        position = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if position is None:
            position = min(len(found.token_ids), len(wanted.token_ids))
        raise ExactnessViolation(
            f"Text {row.index} Seq {index}: output token {position} is "
            f"{found.token_ids[position : position + 1]} with drafts and "
            f"{wanted.token_ids[position : position + 1]} without",
            fix="report it with the engines' config.json and this command",
        )


def _model_end_ids(config: EngineConfig) -> list[int]:
    """End ids that the model's own configuration names."""
    ids = config.pretrained_config.get("eos_token_id")
    if isinstance(ids, int):
        return [ids]
    return [item for item in ids if isinstance(item, int)] if isinstance(ids, list) else []


def _exit_code(rows: Sequence[Row]) -> int:
    """0, or 1 when a row has a named error. Any other error is a bug and is raised."""
    for row in rows:
        if row.error is not None and not isinstance(row.error, LlmctlError):
            raise row.error
    return 1 if any(row.error is not None for row in rows) else 0
