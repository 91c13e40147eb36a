"""What tests of the executor share."""

from __future__ import annotations

from llmctl.runtime.api.executor import Executor, ExecutorConfig, KvCacheConfig
from llmctl.runtime.request import Request

PROMPT = (3, 1, 4, 1, 5)


WAIT_S = 30.0  # a test that waits this long has failed


def config(num_blocks: int = 200, **rest) -> ExecutorConfig:
    return ExecutorConfig(KvCacheConfig(num_blocks), check_invariants=True, **rest)


def collect(executor: Executor, request_id: int):
    """Every response of a request, up to its final one."""
    responses = []
    while True:
        got = executor.await_responses(request_id, WAIT_S)
        assert got, "no response in time"
        responses += got
        if got[-1].result is None or got[-1].result.is_final:
            return responses


def answer(executor: Executor, request: Request):
    """The only response of a request that is not streaming."""
    (response,) = collect(executor, executor.enqueue_request(request))
    return response


def broken(response) -> None:
    raise ValueError("not my day")
