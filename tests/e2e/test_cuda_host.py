"""The CUDA backend's host side over the demo pair, with the CPU's arithmetic: packing, buckets,
padding, replays, slices of logits and who draws which row, all without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import pytest
from support.cuda import FakeCapture, launch_sampling, open_on_fake_device
from support.e2e import DRAFT_LEN, DemoPair, Outputs, PromptMaker, run_all
from support.tree_drafter import drafter_of

from llmctl.plugins.backends.cuda.kernel_spec import Launch
from llmctl.plugins.backends.cuda.queue import DeviceQueue
from llmctl.plugins.ops.sampling.cuda import CudaSampling
from llmctl.runtime.api.executor import Executor, ExecutorConfig, KvCacheConfig
from llmctl.runtime.drafting.draft_engine.drafter import DraftEngineDrafter
from llmctl.runtime.drafting.drafter import Drafter
from llmctl.runtime.drafting.ngram.drafter import NgramDrafter
from llmctl.runtime.request import OutputConfig, Request, SamplingConfig

KINDS = (
    SamplingConfig(),
    SamplingConfig(temperature=0.8, top_k=0, seed=3 << 40),
    SamplingConfig(temperature=1.2, top_k=40, top_p=0.9, min_p=0.02, seed=4),
    SamplingConfig(repetition_penalty=1.3, frequency_penalty=0.2),
    SamplingConfig(temperature=0.5, top_p=0.7, presence_penalty=0.4, seed=5),
    SamplingConfig(temperature=0.9, top_k=0, seed=6, min_tokens=4),
)


@contextmanager
def fake_executor(
    demo: DemoPair,
    draft: str | None,
    acceptance: Literal["tokens", "logits"] = "tokens",
    max_step_ms: float | None = None,
    answers: Outputs | None = None,
) -> Iterator[tuple[Executor, FakeCapture, list[str]]]:
    """(the executor, the target's graphs, names of sampling kernels launched)."""
    queue = DeviceQueue("cpu")
    launched: list[str] = []

    def launch(launches: list[Launch]) -> None:
        for item in launches:
            launched.append(item.spec.name)
            launch_sampling(item)

    target, capture = open_on_fake_device(demo.engine("target-fp8"), queue)
    drafter: Drafter | None = None
    if draft == "trees":
        assert answers is not None
        drafter = drafter_of(answers, DRAFT_LEN)
    elif draft == "ngram":
        drafter = NgramDrafter(DRAFT_LEN, 3)
    elif draft is not None:
        drafter = DraftEngineDrafter(open_on_fake_device(demo.engine(draft), queue)[0], DRAFT_LEN)
    config = ExecutorConfig(
        KvCacheConfig(num_blocks=300),
        acceptance=acceptance,
        max_step_ms=max_step_ms,
    )
    with Executor(target, drafter, config, CudaSampling(queue, launch)) as executor:
        yield executor, capture, launched


@pytest.fixture(scope="module")
def requests(prompts: PromptMaker) -> list[Request]:
    return [
        Request(
            prompt,
            4 + index % 17,
            KINDS[index % len(KINDS)],
            OutputConfig(return_log_probs=index % 5 == 0),
            end_id=1,
            bad_words=((300,), (301, 302)) if index % 7 == 0 else (),
        )
        for index, prompt in enumerate(prompts(36))
    ]


@pytest.fixture(scope="module")
def on_the_cpu(demo: DemoPair, requests: list[Request]) -> Outputs:
    with demo.executor("target-fp8") as executor:
        return run_all(executor, requests)


@pytest.mark.parametrize("draft", [None, "draft-fp8", "ngram", "trees"])
def test_tokens_equal_those_of_the_cpu_backend(
    demo: DemoPair, requests: list[Request], on_the_cpu: Outputs, draft: str | None
) -> None:
    # Trees leave few steps, whose lengths differ; how many repeat depends on the text.
    times = 3 if draft == "trees" else 1
    with fake_executor(demo, draft, answers=on_the_cpu) as (executor, capture, launched):
        for _ in range(times):
            assert run_all(executor, requests) == on_the_cpu
        assert run_all(executor, requests[:3]) == on_the_cpu[:3], "one by one, from a warm cache"
    assert sum(graph.num_replays for graph in capture.graphs) > 5
    assert any(name.startswith("sampling.finish") for name in launched)


def test_steps_limited_in_time_give_the_same_tokens(
    demo: DemoPair, requests: list[Request], on_the_cpu: Outputs
) -> None:
    with fake_executor(demo, None, max_step_ms=500.0) as (executor, _, _):
        assert run_all(executor, requests[:16]) == on_the_cpu[:16]
        steps = executor.get_latest_iteration_stats()
    assert len({step.max_num_tokens_tuner_recommended for step in steps}) > 1


def test_acceptance_by_logits_runs_and_greedy_requests_stay_exact(
    demo: DemoPair, requests: list[Request], on_the_cpu: Outputs
) -> None:
    greedy = [i for i, r in enumerate(requests) if r.sampling_config.is_greedy]
    with fake_executor(demo, "draft-fp8", "logits") as (executor, _, _):
        outputs = run_all(executor, requests)
    assert [outputs[i] for i in greedy] == [on_the_cpu[i] for i in greedy]
    assert [len(output[0]) for output in outputs] > [0] * len(outputs)


def test_log_probs_equal_those_of_the_cpu_backend(demo: DemoPair, requests: list[Request]) -> None:
    asked = [r for r in requests if r.output_config.return_log_probs]

    def log_probs(executor: Executor) -> list[tuple[float, ...] | None]:
        found = []
        for request in asked:
            (request_id,) = executor.enqueue_requests([request])
            (response,) = executor.await_responses(request_id)
            assert response.result is not None
            found.append(response.result.log_probs)
        return found

    with demo.executor("target-fp8") as executor:
        wanted = log_probs(executor)
    with fake_executor(demo, "draft-fp8") as (executor, _, _):
        assert log_probs(executor) == wanted
