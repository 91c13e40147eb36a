"""One `llmctl bench`, from checked options to a report: warm up, run, measure, handle Ctrl-C."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmctl.cli.bench.driver import Driver, Pace
from llmctl.cli.bench.hardware import Reads, limit_json, measure_cpu, processor_name
from llmctl.cli.bench.label import label_warning
from llmctl.cli.bench.load import LoadOptions, make_requests, read_load
from llmctl.cli.bench.progress import Progress
from llmctl.cli.bench.records import Recording
from llmctl.cli.bench.sweep import Sweep
from llmctl.cli.bench.synthetic import ForcedAcceptance, parse_forced
from llmctl.cli.output_files import require_writable
from llmctl.cli.run.acceptance import idle_rule
from llmctl.cli.run.drafting import require_drafts
from llmctl.cli.run.report import architecture
from llmctl.errors import BadConfig, RankFailure
from llmctl.runtime.open import CheckedEngines, EngineOptions, OpenEngines, check_engines

if TYPE_CHECKING:
    from llmctl.plugins.backends.cuda.read_rate import ReadRate
    from llmctl.runtime.request import Request

SETTLE_S = 10.0  # for what an executor does in advance while there are no requests
STEPS_KEPT = 100_000  # of the executor's history; the driver reads it at every response


@dataclass(frozen=True, slots=True)
class Files:
    """Where results go besides stdout."""

    raw: Path | None = None
    report: Path | None = None
    report_json: Path | None = None
    trace: Path | None = None

    def __iter__(self) -> Iterator[Path]:
        found = (self.raw, self.report, self.report_json, self.trace)
        return (path for path in found if path is not None)


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """Everything the command line said."""

    command: str  # "latency" | "throughput"
    engines: EngineOptions
    load: LoadOptions
    pace: Pace = Pace()
    warmup: int = 2
    iterations: int = 1
    has_baseline: bool = False
    sweep: Sweep = Sweep()
    synthetic_acceptance: str | None = None  # as given; interpreted for a draft length
    tune_tree: int | None = None  # drafts of the tree to find
    files: Files = Files()
    is_json: bool = False
    label: str | None = None  # what the user calls the model

    def __post_init__(self) -> None:
        method = self.engines.method
        for name, is_asked in (
            ("--baseline", self.has_baseline),
            (self.sweep.option, bool(self.sweep.option)),
            ("--synthetic-acceptance", self.synthetic_acceptance is not None),
        ):
            if is_asked:
                require_drafts(f"{name} is about drafts, and there are none", method)
        if self.has_baseline and self.sweep.option:
            raise BadConfig(f"{self.sweep.option} measures the baseline too; leave out --baseline")
        is_synthetic = self.synthetic_acceptance is not None
        if is_synthetic and method.acceptance != "tokens":
            raise BadConfig("--synthetic-acceptance takes the place of acceptance by logits")
        if is_synthetic and (method.drafts_trees or self.sweep.trees):
            who = "--sweep-draft-tree" if self.sweep.trees else f"{method.name} drafts trees"
            raise BadConfig(f"--synthetic-acceptance accepts the first drafts of a chain; {who}")


@dataclass(slots=True)
class Way:
    """One way of running the load (with or without drafts, at one draft length), and its recording.
    draft_len: the most drafts of a round; 0: without drafts. tree: the draft engine's, as
    --draft-tree has it. is_reference: without drafts for comparison with the other ways."""

    draft_len: int
    tree: str | None = field(default=None, kw_only=True)
    is_reference: bool = False
    recording: Recording = field(default_factory=Recording)

    @property
    def name(self) -> str:
        """For people."""
        if self.tree is not None:
            return f"draft tree {self.tree}"
        return f"draft length {self.draft_len}" if self.draft_len else "without drafts"


@dataclass(slots=True)
class Measured:
    """The result of a session: the ways in the requested order; the first is the main one."""

    options: BenchOptions
    checked: CheckedEngines
    requests: list[Request]
    ways: list[Way]
    reads: Reads
    read_rate: ReadRate | None
    engine_facts: dict[str, Any]
    forced: ForcedAcceptance | None = None  # of drafts, whatever the target says
    interrupt: type[BaseException] | None = None  # what ended the session early
    failure: RankFailure | None = None  # also

    @property
    def is_partial(self) -> bool:
        """True when not every request was run to its end."""
        return self.interrupt is not None or self.failure is not None

    def requests_of(self, way: Way) -> list[Request]:
        """The requests of one way: the reference refuses what asks for drafts of one kind."""
        if not way.is_reference:
            return self.requests
        return [request.without_window() for request in self.requests]


class Session:
    """Checks everything that needs no weights, loads, runs."""

    def __init__(self, options: BenchOptions) -> None:
        self._options = options

    def measure(self) -> Measured:
        """Run every way. Ctrl-C and the loss of a rank end the runs; what has been recorded by then
        is reported."""
        options = self._options
        require_writable(*options.files, source=options.load.dataset)
        prompts = read_load(options.load)
        checked = check_engines(options.engines)
        warning = label_warning(options.label, checked.target)
        if warning is not None:
            print(warning, file=sys.stderr, flush=True)
        engine_dir = options.engines.engine_dir
        requests = make_requests(options.load, prompts, engine_dir, checked.target)
        options.pace.refuse_endless(len(requests))
        idle = idle_rule(options.engines.method, requests)
        if idle is not None:
            print(idle, file=sys.stderr, flush=True)
        ways = self._ways(checked)
        forced = self._forced(checked)
        read_rate = None
        if checked.num_gpus:  # before engines allocate most of the memory
            from llmctl.plugins.backends.cuda.read_rate import device_read_rate

            read_rate = device_read_rate()
        with closing(OpenEngines(checked, self._log)) as engines:
            reads = Reads.of(engines.opened)
            if not checked.num_gpus:
                read_rate = measure_cpu(reads.target_weights, checked.target.num_ranks)
            facts = {"label": options.label} | _engine_facts(engines)
            measured = Measured(options, checked, requests, ways, reads, read_rate, facts, forced)
            total = len(requests) * options.iterations * len(ways)
            try:
                with Progress(total, is_quiet=options.is_json) as progress:
                    self._run(engines, measured, progress)
            except KeyboardInterrupt as stop:  # Ctrl-C, and SIGTERM by cli/signals.py
                measured.interrupt = type(stop)
            except RankFailure as error:
                measured.failure = error
        if checked.num_gpus:
            _forget_low_rate(measured)
        return measured

    def _ways(self, checked: CheckedEngines) -> list[Way]:
        options = self._options
        if options.sweep.option:
            for method in options.sweep.trees.values():
                method.check(checked.target, checked.configs)
            trees = (
                Way(method.draft_len or 0, tree=tree)
                for tree, method in options.sweep.trees.items()
            )
            return [Way(0, is_reference=True), *map(Way, options.sweep.lengths), *trees]
        ways = [Way(checked.draft_len)]
        return [*ways, Way(0, is_reference=True)] if options.has_baseline else ways

    def _forced(self, checked: CheckedEngines) -> ForcedAcceptance | None:
        options = self._options
        if options.synthetic_acceptance is None:
            return None
        return parse_forced(
            options.synthetic_acceptance,
            checked.draft_len,
            is_sweep=bool(options.sweep.option),
            seed=options.load.sampling.seed,
        )

    def _run(self, engines: OpenEngines, measured: Measured, progress: Progress) -> None:
        """All iterations; ways alternate, so that a slow period of the machine affects them
        equally."""
        iterations, ways = self._options.iterations, measured.ways
        if len(ways) == 1:
            way = ways[0]
            with self._driver(engines, measured, way, progress) as driver:
                for _ in range(iterations):
                    driver.run(measured.requests_of(way), self._options.pace, way.recording)
            return
        for _ in range(iterations):
            for way in ways:
                with self._driver(engines, measured, way, progress) as driver:
                    driver.run(measured.requests_of(way), self._options.pace, way.recording)

    @contextmanager
    def _driver(
        self, engines: OpenEngines, measured: Measured, way: Way, progress: Progress
    ) -> Iterator[Driver]:
        """A driver of an executor that has run its warm-up."""
        count, requests, forced = self._options.warmup, measured.requests_of(way), measured.forced
        with engines.executor(
            is_speculative=way.draft_len > 0,
            method=None if way.tree is None else self._options.sweep.trees[way.tree],
            # A length that is asked for is fixed; without one a method may draft by chance.
            draft_len=way.draft_len if self._options.sweep.option else None,
            acceptance=forced.acceptance(way.draft_len) if forced and way.draft_len else None,
            num_iterations_kept=STEPS_KEPT,
        ) as executor:
            if count:
                progress.say("warming up")
                warm = [requests[index % len(requests)] for index in range(count)]
                pace = Pace(concurrency=self._options.pace.concurrency)
                Driver(executor).run(warm, pace, Recording())
            executor.settle(SETTLE_S)
            captured = executor.num_graphs_captured
            progress.say(_name(way, self._options))
            try:
                yield Driver(executor, progress)
            finally:
                way.recording.num_graphs_captured += executor.num_graphs_captured - captured

    def _log(self, lines: list[str]) -> None:
        if not self._options.is_json:
            print("\n".join(lines), file=sys.stderr, flush=True)


def _name(way: Way, options: BenchOptions) -> str:
    if not options.engines.method.is_drafting:
        return "requests"
    return way.name


def _engine_facts(engines: OpenEngines) -> dict[str, Any]:
    """What a reader of a report must know of the engines."""
    from importlib.metadata import version

    config = engines.checked.target
    method = engines.checked.options.method
    quantization = config.pretrained_config.get("quantization") or {}
    loaded = (engines.target, *engines.opened.draft_engines)
    kv_bytes = sum(engine.kv_bytes_per_block for engine in loaded)
    return {
        "model": architecture(config),
        "engine_dir": str(engines.checked.options.engine_dir),
        "draft_engine_dir": next(map(str, method.engines.values()), None),
        "draft_method": method.name if method.is_drafting else None,
        "draft_len": engines.checked.draft_len,
        "backend": config.backend,
        "num_ranks": config.num_ranks,
        "draft_num_ranks": next((e.config.num_ranks for e in engines.opened.draft_engines), None),
        "device": engines.opened.device_name or processor_name(),
        "dtype": config.pretrained_config.get("dtype"),
        "quantization": quantization.get("quant_algo"),
        "kv_cache_dtype": quantization.get("kv_cache_quant_algo"),
        "load_format": config.weights["load_format"],
        "max_batch_size": engines.target.max_batch_size,
        "max_num_tokens": engines.target.max_num_tokens,
        "max_sequence_length_tokens": engines.target.max_seq_len,
        "weight_mb": engines.target.weight_bytes / 1e6,
        "all_weight_mb": sum(engine.weight_bytes for engine in loaded) / 1e6,
        "kv_kb_per_token": kv_bytes / engines.target.tokens_per_block / 1e3,
        "kv_blocks": engines.kv_plan.num_blocks,
        "kv_mb": engines.kv_plan.total_bytes / 1e6,
        "version": version("llmctl"),
    }


def _forget_low_rate(measured: Measured) -> None:
    """A read rate that a run has exceeded is not kept for the next."""
    from llmctl.plugins.backends.cuda.read_rate import forget_read_rate

    ways = (way.recording.steps for way in measured.ways)
    limits = [limit_json(measured.reads, measured.read_rate, steps) for steps in ways]
    if any(limit is not None and limit["is_exceeded"] for limit in limits):
        forget_read_rate()
