"""All ranks of the demo target in lockstep on one device, with the CPU's arithmetic: the tokens of
ranks that are processes, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest
from support.cuda import FakeCapture, launch_sampling, open_on_fake_device
from support.e2e import DRAFT_LEN, DemoPair, Outputs, PromptMaker, run_all
from support.lockstep import open_in_lockstep
from support.rounds_by_reference import run_rounds_by_reference

from llmctl.plugins.backends.cuda.kernel_spec import Launch, StepShape
from llmctl.plugins.backends.cuda.queue import DeviceQueue
from llmctl.plugins.ops.sampling.cuda import CudaSampling
from llmctl.runtime.api.executor import Executor, ExecutorConfig, KvCacheConfig
from llmctl.runtime.drafting.draft_engine.drafter import DraftEngineDrafter
from llmctl.runtime.drafting.draft_engine.method import DraftEngine
from llmctl.runtime.drafting.drafter import Drafter
from llmctl.runtime.drafting.method import DraftMethod
from llmctl.runtime.drafting.ngram.drafter import NgramDrafter
from llmctl.runtime.drafting.plain.method import PlainDecoding
from llmctl.runtime.request import OutputConfig, Request, SamplingConfig
from llmctl.runtime.rounds.cuda_rounds import CudaRoundRunner

pytestmark = pytest.mark.usefixtures("forked_ranks")
TARGET = "target-fp8-tp2"
KINDS = (
    SamplingConfig(),
    SamplingConfig(temperature=0.8, top_k=0, seed=3 << 40),
    SamplingConfig(repetition_penalty=1.3, frequency_penalty=0.2),
)
FILTERED = SamplingConfig(temperature=0.8, top_k=40, top_p=0.9, seed=5)


@contextmanager
def lockstep_executor(
    demo: DemoPair, draft: str | None
) -> Iterator[tuple[Executor, FakeCapture, list[StepShape]]]:
    """(the executor, the target's graphs, the steps that it was asked for)."""
    queue = DeviceQueue("cpu")

    def launch(launches: list[Launch]) -> None:
        for item in launches:
            launch_sampling(item)

    target, capture = open_in_lockstep(demo.engine(TARGET), queue)
    drafter: Drafter | None = None
    if draft == "ngram":
        drafter = NgramDrafter(DRAFT_LEN, 3)
    elif draft is not None:
        drafter = DraftEngineDrafter(open_on_fake_device(demo.engine(draft), queue)[0], DRAFT_LEN)
    config = ExecutorConfig(KvCacheConfig(num_blocks=200))
    with Executor(target, drafter, config, CudaSampling(queue, launch)) as executor:
        yield executor, capture, target.program.shapes


@pytest.fixture(scope="module")
def requests(prompts: PromptMaker) -> list[Request]:
    return [
        Request(
            prompt,
            4 + index % 9,
            KINDS[index % len(KINDS)],
            OutputConfig(return_log_probs=index % 5 == 0),
            end_id=1,
        )
        for index, prompt in enumerate(prompts(18))
    ]


@pytest.fixture(scope="module")
def filtered(requests: list[Request]) -> list[Request]:
    """The sampled ones with filters."""
    return [replace(request, sampling_config=FILTERED) for request in requests[1 :: len(KINDS)]]


@pytest.fixture(scope="module")
def by_processes(demo: DemoPair, requests: list[Request], filtered: list[Request]) -> list[Outputs]:
    with demo.executor(TARGET, max_tokens=8192) as executor:
        return [run_all(executor, asked) for asked in (requests, filtered)]


@pytest.fixture(scope="module")
def of_processes(by_processes: list[Outputs]) -> Outputs:
    return by_processes[0]


@pytest.mark.parametrize("draft", [None, "draft-fp8", "ngram"])
def test_tokens_equal_those_of_processes(
    demo: DemoPair, requests: list[Request], of_processes: Outputs, draft: str | None
) -> None:
    with lockstep_executor(demo, draft) as (executor, capture, _):
        assert run_all(executor, requests) == of_processes
        assert run_all(executor, requests[:3]) == of_processes[:3], "one by one, from a warm cache"
    assert sum(graph.num_replays for graph in capture.graphs) > 0


@pytest.mark.parametrize(
    ("kind", "output", "is_best"),
    [
        (SamplingConfig(), OutputConfig(), True),
        (SamplingConfig(), OutputConfig(return_log_probs=True), False),
        (SamplingConfig(min_tokens=7), OutputConfig(), False),
        (SamplingConfig(no_repeat_ngram_size=2), OutputConfig(), False),
        (SamplingConfig(temperature=0.8, top_k=5), OutputConfig(), False),
    ],
)
def test_the_host_asks_for_logits_where_it_reads_them(
    demo: DemoPair,
    prompts: PromptMaker,
    kind: SamplingConfig,
    output: OutputConfig,
    is_best: bool,
) -> None:
    """`min_tokens` bans the end for all 7 tokens. A request that needs them makes all gather."""
    asked = [Request(prompt, 7, kind, output, end_id=1) for prompt in prompts(3)]
    with lockstep_executor(demo, "ngram") as (executor, _, shapes):
        run_all(executor, asked)
        assert {shape.best_only for shape in shapes if shape.num_rows} == {is_best}
        before = len(shapes)
        run_all(executor, [replace(asked[0], sampling_config=SamplingConfig()), *asked[1:]])
        together = [s for s in shapes[before:] if s.num_rows and s.num_requests > 1]
        assert together and all(shape.best_only == is_best for shape in together[:3])


@pytest.mark.parametrize(
    ("draft", "is_apart"),
    [(None, False), ("draft-fp8", True), ("draft-fp8-tp2", False), ("draft-fp8-tp2", True)],
)
def test_rounds_gather_logits_for_filters_alone(
    demo: DemoPair,
    requests: list[Request],
    filtered: list[Request],
    by_processes: list[Outputs],
    draft: str | None,
    is_apart: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So do rounds of a draft engine with ranks. Ranks on one device gather for every draw with a
    temperature."""
    run_rounds_by_reference(monkeypatch)
    queue = DeviceQueue("cpu")
    open_ranks = partial(open_in_lockstep, queue=queue, has_peers=is_apart)
    engines = {"target": open_ranks(demo.engine(TARGET))[0]}
    method: DraftMethod = PlainDecoding()
    if draft is not None:
        method = DraftEngine(demo.engine(draft), DRAFT_LEN)
        is_shared = draft.endswith("tp2")
        opened = open_ranks if is_shared else partial(open_on_fake_device, queue=queue)
        engines["draft"] = opened(demo.engine(draft))[0]
    drafter = method.make_drafter(engines, DRAFT_LEN)
    on_device = method.make_device_drafter(engines, DRAFT_LEN, drafter)
    assert on_device is not None
    target = engines["target"]
    runner = CudaRoundRunner(target, on_device, FakeCapture())
    config = ExecutorConfig(KvCacheConfig(num_blocks=200))
    sampling = CudaSampling(queue, lambda launches: [launch_sampling(item) for item in launches])
    pairs = list(zip(requests, by_processes[0], strict=True))
    loads = [  # whether logits stay with the ranks, in rounds
        (pairs[:: len(KINDS)], True),
        (pairs[1 :: len(KINDS)], is_apart),
        (list(zip(filtered, by_processes[1], strict=True)), False),
    ]
    with Executor(target, drafter, config, sampling, runner) as executor:
        for load, is_best in loads:
            asked = [pair for pair in load if not pair[0].output_config.return_log_probs]
            before = {role: len(engine.program.shapes) for role, engine in engines.items()}
            assert run_all(executor, [request for request, _ in asked]) == [t for _, t in asked]
            for role, engine in engines.items():
                shapes = engine.program.shapes[before[role] :]
                found = {shape.best_only for shape in shapes if shape.num_rows}
                if role == "target" and load is not loads[0][0]:
                    found.remove(False)  # the host draws behind a prompt
                    found = found or {False}
                assert found == {is_best and engine.shares_logits}, role
    assert runner._num_started > 5
