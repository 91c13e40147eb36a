"""Programs that end, fork or wait with an executor open: nobody waits for ever."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from time import monotonic, sleep

import numpy as np
import pytest
from support.executor import PROMPT, WAIT_S, collect

from llmctl.errors import BadConfig, ExecutorClosed, RequestError
from llmctl.runtime.api import executor as module
from llmctl.runtime.api.async_executor import AsyncExecutor
from llmctl.runtime.request import FinishReason, Request

# A program whose request is in the middle of a step that takes as long as it is told to.
_PROGRAM = """
import atexit, sys, threading, time
from support.executor import PROMPT, config
from support.fake_engine import FakeEngine
from llmctl.plugins.ops.sampling.reference import ReferenceSampling
from llmctl.runtime.api import executor as module
from llmctl.runtime.request import Request

class Slow(FakeEngine):
    def run(self, step):
        running.set()
        time.sleep({step_s})
        return super().run(step)

module.EXIT_WAIT_S = 0.5
running = threading.Event()
executor = module.Executor(Slow(), None, config(), ReferenceSampling())
ended = []
executor.enqueue_request(Request(PROMPT, 40), lambda response: ended.append(response))
running.wait()
{ending}
"""
_TOLD = "print(*[r.result.finish_reason.value for r in ended])"


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("sys.exit(3)", 3),
        ("raise ValueError('oh')", 1),
        ("pass", 0),
        ("atexit.register(executor.shutdown)", 0),
        ("executor.shutdown(); executor.shutdown()", 0),
    ],
)
def test_a_program_ends_with_its_executor_open_and_its_request_cancelled(repository, ending, code):
    # Callbacks of atexit run last one first; those of a module that is imported run after ours.
    told = f"module._end_all(); {_TOLD}"
    done = _run(repository, f"atexit.register(lambda: exec({told!r}))\n{ending}", step_s=0.05)
    assert done.returncode == code, done.stderr
    assert done.stdout == "cancelled\n" and "llmctl:" not in done.stderr


def test_a_step_that_never_ends_is_not_waited_for(repository):
    began = monotonic()
    done = _run(repository, "sys.exit(3)", step_s=1000)
    assert done.returncode == 3 and "0.5 s after the program's end" in done.stderr
    assert monotonic() - began < WAIT_S


def _run(repository, ending: str, step_s: float) -> subprocess.CompletedProcess[str]:
    text = _PROGRAM.format(ending=ending, step_s=step_s)
    paths = os.pathsep.join([str(repository / "tests"), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-c", text],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": paths},
    )


@pytest.mark.parametrize("name", ["shutdown", "await_responses", "generate"])
def test_a_deliver_that_would_wait_for_its_own_thread_is_told_so(make, monkeypatch, name):
    told = threading.Event()
    errors = []
    monkeypatch.setattr(
        threading, "excepthook", lambda given: (errors.append(given.exc_value), told.set())
    )
    executor = make()
    calls = {
        "shutdown": executor.shutdown,
        "await_responses": executor.await_responses,
        "generate": lambda: list(executor.generate(PROMPT, max_tokens=3)),
    }
    executor.enqueue_request(Request(PROMPT, 30, streaming=True), lambda response: calls[name]())
    assert told.wait(WAIT_S)
    assert isinstance(errors[0], BadConfig) and "own thread" in str(errors[0])
    (last,) = collect(executor, executor.enqueue_request(Request(PROMPT, 2)))
    assert last.result.finish_reason is FinishReason.LENGTH, "others are served"


def test_a_forked_process_waits_for_no_response_of_its_parents(make, gated):
    class OneStep(gated):
        """The gate closes behind a step until `ends`."""

        ends = False

        def run(self, step):
            computed = super().run(step)
            if not self.ends:
                self.gate.clear()
            return computed

    engine = OneStep()
    executor = make(engine)
    tokens = executor.generate(PROMPT, max_tokens=100)
    engine.gate.set()
    next(tokens)
    request_id = executor.enqueue_request(Request(PROMPT, 3))
    child = os.fork()
    if child == 0:
        code = 1
        try:
            (response,) = executor.await_responses(request_id)
            assert isinstance(response.error, RequestError)
            try:
                list(tokens)
            except RequestError:
                code = 7
        finally:
            os._exit(code)
    deadline = monotonic() + WAIT_S
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and monotonic() < deadline:
        threading.Event().wait(0.01)
    if ended == (0, 0):
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(ended[1]) == 7 and ended[0] == child
    engine.ends = True
    engine.gate.set()
    rest = list(tokens)
    assert rest == list(executor.generate(PROMPT, max_tokens=100))[1:], "the parent has its own"
    assert collect(executor, request_id)
    assert module._running


@pytest.mark.parametrize("timeout_s", [float("nan"), "1", [1]])
def test_a_wait_of_no_number_of_seconds_is_refused(make, timeout_s):
    """One of NaN seconds never ended."""
    with pytest.raises(BadConfig, match="timeout_s is .*; it must be a number"):
        make().await_responses(timeout_s=timeout_s)
    with pytest.raises(BadConfig, match="timeout_s is .*; it must be a number"):
        make().settle(timeout_s)


def test_a_wait_longer_than_threads_can_wait_is_as_long_as_they_can(make):
    executor = make()
    request_id = executor.enqueue_request(Request(PROMPT, 3))
    assert executor.await_responses(request_id, timeout_s=float("inf"))
    assert executor.settle(1e30)


@pytest.mark.parametrize(
    ("call", "given", "wanted"),
    [
        ("await_responses", 1.5, "an integer, or a sequence of integers, or None"),
        ("await_responses", "1", "an integer, or a sequence of integers, or None"),
        ("await_responses", [1, "2"], "an integer, or a sequence of integers, or None"),
        ("await_responses", True, "an integer, or a sequence of integers, or None"),
        ("cancel_request", [1], "an integer"),
        ("cancel_request", None, "an integer"),
        ("get_num_responses_ready", [1], "an integer, or None"),
    ],
)
def test_what_is_no_id_of_a_request_is_refused_by_name(make, call, given, wanted):
    with pytest.raises(BadConfig) as caught:
        getattr(make(), call)(given)
    kind = type(given).__name__
    assert str(caught.value) == f"request_id is {given!r} ({kind}); it must be {wanted}"


def test_ids_may_be_integers_of_numpy(make):
    executor = make()
    ids = np.array(executor.enqueue_requests([Request(PROMPT, 2)] * 2))
    assert [len(each) for each in executor.await_responses(ids)] == [1, 1]
    assert executor.await_responses(ids[0])[0].has_error, "it was taken"
    executor.cancel_request(ids[0])


@pytest.mark.parametrize("prompt", [5, None, "text", b"text", {1: 2}])
def test_a_prompt_that_is_no_token_ids_is_refused_by_name(make, prompt):
    with pytest.raises(BadConfig, match="input_token_ids is .*; it must be a sequence of token"):
        next(make().generate(prompt, max_tokens=3))


@pytest.fixture
def slow(fake):
    """An engine that has far from ended 200 tokens when the first is there."""

    class Slow(fake.Engine):
        def run(self, step):
            sleep(0.005)
            return super().run(step)

    return Slow()


def test_an_output_that_a_shutdown_cuts_is_no_whole_one(make, slow):
    executor = make(slow)
    tokens = executor.generate(PROMPT, max_tokens=200)
    next(tokens)
    executor.shutdown()
    with pytest.raises(ExecutorClosed, match="shut down before this output ended"):
        list(tokens)


def test_the_same_for_asyncio(make, slow):
    async def cut():
        executor = AsyncExecutor(make(slow))
        tokens = executor.generate(Request(PROMPT, 200, streaming=True))
        await anext(tokens)
        await executor.shutdown()
        return [token async for token in tokens]

    with pytest.raises(ExecutorClosed, match="shut down before this output ended"):
        asyncio.run(cut())
