"""llmctl and vLLM as servers of one load, for scripts/compare/load.py.

Both are driven through their own Python interfaces, from one thread, and their tokens are timed as
they arrive there: llmctl by cli/bench/driver.py, vLLM through its asyncio engine, with the same
clock, the same pace and the same records. vLLM computes in a process of its own, llmctl in a
thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from llmctl.cli.bench.driver import Driver, Pace, add_iteration
from llmctl.cli.bench.records import Arrival, Clock, Recording, RequestRecord
from llmctl.cli.bench.session import SETTLE_S, STEPS_KEPT
from llmctl.plugins.ops.paged_attention.fp8_context import Fp8Tokens
from llmctl.runtime.api.executor import Executor
from llmctl.runtime.open import EngineOptions, OpenEngines, check_engines
from llmctl.runtime.request import Request

FP8_TOKENS = {  # as a table of results names what attention multiplies
    Fp8Tokens.NONE: "",
    Fp8Tokens.PROMPTS: ", FP8 prompts",
    Fp8Tokens.ALL: ", FP8 attention",
}


class Server(Protocol):
    """Runs a load and writes down when tokens came."""

    settings: str  # what a reader must know of how it was set up
    planted: Mapping[str, object] | None  # what `next_tokens` needs to know its text

    def run(self, requests: Sequence[Request], pace: Pace, recording: Recording) -> None: ...


# ---- llmctl ----


class Llmctl:
    """An executor, and what implies its text where an engine's weights are planted."""

    def __init__(self, engines: OpenEngines, executor: Executor, settings: str) -> None:
        self.settings = settings
        weights = engines.checked.target.weights
        self.planted = weights if weights.get("load_format") == "planted" else None
        self._executor = executor

    def run(self, requests: Sequence[Request], pace: Pace, recording: Recording) -> None:
        """Add one iteration to the recording, behind what the executor captures without one."""
        self._executor.settle(SETTLE_S)
        Driver(self._executor).run(requests, pace, recording)


@contextmanager
def llmctl_server(
    engine_dir: Path, max_num_tokens: int | None, max_step_ms: float | None, chunks: bool
) -> Iterator[Llmctl]:
    """An engine of ours, loaded; nothing is kept of earlier prompts."""
    options = EngineOptions(
        engine_dir,
        enable_block_reuse=False,
        max_num_tokens=max_num_tokens,
        max_step_ms=max_step_ms,
        enable_chunked_context=chunks,
    )
    engines = OpenEngines(check_engines(options))
    size = max_num_tokens or engines.target.max_num_tokens
    settings = f"{size:,} tokens a step" if chunks else "whole prompts"
    settings += FP8_TOKENS[engines.target.plan.fp8_tokens]
    if max_step_ms is not None:
        settings += f", --max-step-ms {max_step_ms:g}"
    with engines.executor(is_speculative=False, num_iterations_kept=STEPS_KEPT) as executor:
        yield Llmctl(engines, executor, settings)


# ---- vLLM ----


class Vllm:
    """vLLM's asyncio engine, and the event loop that it belongs to."""

    def __init__(self, engine: Any, runner: asyncio.Runner, settings: str) -> None:
        self.settings = settings
        self.planted: Mapping[str, object] | None = None
        self._engine = engine
        self._runner = runner
        self._num_requests = 0

    def run(self, requests: Sequence[Request], pace: Pace, recording: Recording) -> None:
        """Add one iteration to the recording, as `Driver.run` does."""
        records = add_iteration(recording, requests, pace)
        self._runner.run(self._serve(requests, records, pace.concurrency or len(requests)))

    async def _serve(
        self, requests: Sequence[Request], records: Sequence[RequestRecord], concurrency: int
    ) -> None:
        clock, room = Clock(), asyncio.Semaphore(concurrency)  # served in the order of waiting
        async with asyncio.TaskGroup() as group:
            for request, record in zip(requests, records, strict=True):
                group.create_task(self._ask(request, record, clock, room))

    async def _ask(
        self, request: Request, record: RequestRecord, clock: Clock, room: asyncio.Semaphore
    ) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=0,
            max_tokens=request.max_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        prompt = {"prompt_token_ids": list(request.input_token_ids)}
        self._num_requests += 1
        name = str(self._num_requests)
        if record.due_s:
            await asyncio.sleep(max(0.0, record.due_s - clock.now_s()))
        async with room:
            record.submit_s = clock.now_s()
            async for output in self._engine.generate(prompt, params, name):
                tokens = output.outputs[0].token_ids
                if tokens:
                    record.arrivals.append(Arrival(clock.now_s(), len(tokens)))
                    record.output_ids += tokens
        record.is_done = True


def vllm_arguments(
    model: Path, load_format: str, max_seq_len: int, max_batch_size: int, max_num_tokens: int | None
) -> dict[str, Any]:
    """What its engine is given. Everything else, compilation and CUDA graphs among it, is as its
    server has it by default; prompts' blocks are not kept, as in our runs."""
    arguments: dict[str, Any] = {
        "model": str(model),
        "load_format": load_format,
        "max_model_len": max_seq_len,
        "max_num_seqs": max_batch_size,
        "enable_prefix_caching": False,
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
    }
    if max_num_tokens is not None:
        arguments["max_num_batched_tokens"] = max_num_tokens
    return arguments


@contextmanager
def vllm_server(arguments: dict[str, Any]) -> Iterator[Vllm]:
    """An engine of vLLM with the defaults of its server, closed at the end."""
    from vllm import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    async def start() -> Any:
        context = UsageContext.OPENAI_API_SERVER  # decides defaults such as tokens a step
        return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments), usage_context=context)

    with asyncio.Runner() as runner:
        engine = runner.run(start())
        size = engine.vllm_config.scheduler_config.max_num_batched_tokens
        try:
            yield Vllm(engine, runner, f"{size:,} tokens a step")
        finally:
            engine.shutdown()
