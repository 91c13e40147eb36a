"""The executor for asyncio: `async for token in executor.generate(request)`.

Responses go from the executor's thread straight to the event loop; no thread waits for them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

from llmctl.errors import BadConfig
from llmctl.runtime.core import Request, Response
from llmctl.runtime.executor import Executor
from llmctl.runtime.mailbox import is_final


class AsyncExecutor:
    """An asyncio face of an executor, which may be used directly at the same time.

    Whoever stops reading early, by `break`, cancellation or an exception, cancels the request.
    """

    def __init__(self, executor: Executor) -> None:
        self.executor = executor

    async def responses(self, request: Request) -> AsyncIterator[Response]:
        """Every response, up to the final one. Raises ExecutorClosed or QueueFull."""
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[Response] = asyncio.Queue()

        def deliver(response: Response) -> None:
            with suppress(RuntimeError):  # the event loop is closed: nobody reads any more
                loop.call_soon_threadsafe(arrived.put_nowait, response)

        request_id = self.executor.enqueue_request(request, deliver)
        is_over = False
        try:
            while not is_over:
                response = await arrived.get()
                is_over = is_final(response)
                yield response
        finally:
            if not is_over:
                self.executor.cancel_request(request_id)

    async def generate(self, request: Request) -> AsyncIterator[int]:
        """The output token by token, as it comes; the request must be streaming and have one
        sequence. Raises the error that ended the request, if one did."""
        sampling, output = request.sampling_config, request.output_config
        if not request.streaming or output.return_all_generated_tokens:
            raise BadConfig(
                "generate yields tokens as they come; the request must be streaming, without "
                "return_all_generated_tokens",
                fix="set streaming=True, or read responses()",
            )
        if sampling.num_return_sequences != 1:
            raise BadConfig(
                f"num_return_sequences is {sampling.num_return_sequences}; generate yields the "
                "tokens of one sequence",
                fix="read responses(), which say whose tokens they carry",
            )
        responses = self.responses(request)
        try:
            async for response in responses:
                if response.result is None:
                    assert response.error is not None
                    raise response.error
                for token in response.result.output_token_ids:
                    yield token
        finally:
            await responses.aclose()  # type: ignore[attr-defined]  # a generator, typed by its use

    async def result(self, request: Request) -> list[Response]:
        """All responses of a request at once."""
        return [response async for response in self.responses(request)]

    async def shutdown(self, *, drain: bool = False) -> None:
        """End the executor without blocking the event loop; see Executor.shutdown."""
        await asyncio.to_thread(self.executor.shutdown, drain=drain)
