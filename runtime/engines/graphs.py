"""Steps of recurring shape are captured once as a CUDA graph and replayed.

A step is padded to a bucket, so few graphs serve all generation. Padding tokens write nothing (slot
-1) and belong to no request; padding requests have no tokens. Kernels read everything that varies
within a bucket from device memory, so a replay needs an upload and one call.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from llmctl.plugins.backends.cuda.kernel_spec import StepLimits, StepShape
from llmctl.plugins.backends.cuda.queue import DeviceQueue, device_errors
from llmctl.plugins.core.calls import StepInputs, Trees, tree_lens
from llmctl.plugins.ops.paged_attention.shared.source_specs import SHORT

# Tokens; shorter contexts share the first one's grids, whose idle blocks exit at once. Behind these
# come powers of two. 1,536 tokens are 20 work items of attention (`Variant` in verification.py).
_KV_BUCKETS = (1024, 1536)
# Tokens: products compute so many at once, and packing a large step hides behind its start.
_MOST_PADDING = 128
_ANY_QUERY = 32  # tokens of one request, beyond which kernels do not care how many there are
MAX_GRAPHS = 24  # of an engine's own steps, and of its rounds; the memory plan uses it

Key = TypeVar("Key", bound=Hashable)


def shape_of(step: StepInputs) -> StepShape:
    """The shape of a step as it is."""
    lens, trees = np.diff(step.cu_q), step.trees
    most = 0 if trees is None else int(tree_lens(step, trees)[trees.start >= 0].max())
    longest = int(lens.max())
    return StepShape(
        num_tokens=step.num_tokens,
        num_requests=step.num_requests,
        num_rows=step.num_rows,
        max_query_len=longest,
        max_kv_len=int(step.kv_len.max()),
        max_tree_len=most,
        num_single=int((lens == 1).sum()),
        best_only=step.best_only,
        num_short=int((lens <= SHORT).sum()) if longest > SHORT else step.num_requests,
    )


def kv_bucket(max_kv_len: int, limits: StepLimits) -> int:
    """The context length that grids are made for: one of few, or the engine's limit."""
    found = next((each for each in _KV_BUCKETS if max_kv_len <= each), None)
    return min(found or _power_of_two(max_kv_len), limits.max_seq_len)


def kv_buckets(limits: StepLimits) -> list[int]:
    """Every value of `kv_bucket`, the shortest first."""
    found = [kv_bucket(1, limits)]
    while found[-1] < limits.max_seq_len:
        found.append(kv_bucket(found[-1] + 1, limits))
    return found


@dataclass(frozen=True, slots=True)
class Buckets:
    """Which steps are replayed, and the shape they are padded to.

    Query lengths are padded to a power of two or to that of a full verification; two tokens is
    what a draft engine reads after all its drafts were accepted.
    """

    limits: StepLimits

    @property
    def max_query_len(self) -> int:
        """Most tokens of one request in a replayed step."""
        return max(self.limits.max_draft_len + 1, 2)

    def fit(self, shape: StepShape) -> StepShape | None:
        """The bucket of a step; None for one that is launched directly (prompts, mostly)."""
        limits = self.limits
        if shape.max_query_len > self.max_query_len or shape.num_rows < shape.num_requests:
            return None
        requests = min(_power_of_two(shape.num_requests), limits.max_batch_size)
        query = shape.max_query_len
        if query < limits.max_draft_len + 1:
            query = min(_power_of_two(query), self.max_query_len)
        # The last of the rows are those of the tokens, or one per request.
        rows = requests if shape.num_rows <= requests else requests * query
        if requests * query > limits.max_num_tokens or rows > limits.max_num_rows:
            return None
        return StepShape(
            num_tokens=requests * query,
            num_requests=requests,
            num_rows=rows,
            max_query_len=query,
            max_kv_len=kv_bucket(shape.max_kv_len, limits),
            max_tree_len=self._tree_len(shape, query),
            best_only=shape.best_only,
        )

    def round_up(self, shape: StepShape) -> StepShape:
        """A larger shape, one of few, for a step that is launched directly: packing launches for a
        new number of tokens takes longer than processing a sixteenth more tokens. Requests and rows
        stay the same."""
        limits = self.limits
        unit = min(max(8, _power_of_two(shape.num_tokens) // 32), _MOST_PADDING)
        requests, query = shape.num_requests, shape.max_query_len
        longer = _power_of_two(requests - shape.num_single)  # requests, at most
        chunks = _power_of_two(requests - shape.num_short) if limits.fp8_generation else requests
        return replace(
            shape,
            num_tokens=min(-(-shape.num_tokens // unit) * unit, limits.max_num_tokens),
            max_query_len=query if query <= _ANY_QUERY else _power_of_two(query),
            max_kv_len=kv_bucket(shape.max_kv_len, limits),
            max_tree_len=self._tree_len(shape, self.max_query_len),
            num_single=max(0, requests - longer),
            num_short=max(0, requests - chunks),
        )

    def _tree_len(self, shape: StepShape, query: int) -> int:
        """That of requests of up to `query` tokens; earlier steps may have stored more."""
        most = shape.max_tree_len
        return _power_of_two(most) if most > query else query * (most > 0)

    def prompt_shapes(self, max_num_tokens: int) -> list[StepShape]:
        """The shapes that `round_up` gives for steps with prompts, one for each number of
        tokens."""
        limits = self.limits
        sizes = range(limits.tokens_per_block, min(max_num_tokens, limits.max_num_tokens) + 1)
        shapes = (StepShape(count, 1, 1, count, 1) for count in sizes)
        return list({shape.num_tokens: shape for shape in map(self.round_up, shapes)}.values())


def pad(step: StepInputs, shape: StepShape) -> StepInputs:
    """The step with padding at its end, so that it has the tokens, requests and rows of `shape`."""
    if (step.num_tokens, step.num_requests, step.num_rows) == (
        shape.num_tokens,
        shape.num_requests,
        shape.num_rows,
    ):
        return step
    trees = step.trees
    if trees is not None:
        roots = None if trees.roots is None else _extend(trees.roots, shape.num_requests, 0)
        trees = Trees(_extend(trees.start, shape.num_requests, -1), trees.paths, roots)
    ends = step.context_end
    return StepInputs(
        token_ids=_extend(step.token_ids, shape.num_tokens, 0),
        position_ids=_extend(step.position_ids, shape.num_tokens, 0),
        cu_q=_extend(step.cu_q, shape.num_requests + 1, step.num_tokens),
        kv_len=_extend(step.kv_len, shape.num_requests, 0),
        block_tables=_extend(step.block_tables, shape.num_requests, 0),
        slot_mapping=_extend(step.slot_mapping, shape.num_tokens, -1),
        logit_rows=_extend(step.logit_rows, shape.num_rows, 0),
        trees=trees,
        best_only=step.best_only,
        context_end=None if ends is None else _extend(ends, shape.num_requests, 0),
    )


class Replayable(Protocol):
    """A captured graph."""

    def replay(self) -> None: ...


class GraphCache(Generic[Key]):
    """Graphs by key, with sizes (1 if `size` is not given) that together are at most `max_graphs`;
    the least recently used is dropped first. The first time a key is run its work is launched
    directly and captured afterwards, so no step waits for a capture and nothing is allocated or set
    up during one. A graph that the device is still running completes before it is dropped."""

    def __init__(
        self,
        capture: Callable[[Callable[[], None]], Replayable],
        max_graphs: int = MAX_GRAPHS,
        size: Callable[[Key], int] = lambda key: 1,
    ) -> None:
        self._capture = capture
        self._max_graphs = max_graphs
        self._size = size
        self._graphs: OrderedDict[Key, Replayable] = OrderedDict()
        self.num_captured = 0

    def __len__(self) -> int:
        return len(self._graphs)

    def __contains__(self, key: Key) -> bool:
        return key in self._graphs

    def has_room(self, key: Key) -> bool:
        """Whether a new key takes no other's place."""
        return sum(map(self._size, self._graphs)) + self._size(key) <= self._max_graphs

    def run(self, key: Key, record: Callable[[], None]) -> None:
        """Do what `record` enqueues, which must be the same for every run of this key."""
        graph = self._graphs.get(key)
        if graph is not None:
            self._graphs.move_to_end(key)
            graph.replay()
            return
        record()
        left = self._max_graphs - self._size(key)
        while self._graphs and sum(map(self._size, self._graphs)) > left:
            self._graphs.popitem(last=False)  # drop before adding: never more than planned
        self._graphs[key] = self._capture(record)
        self.num_captured += 1

    def clear(self) -> None:
        """Forget all graphs: the addresses they hold are no longer valid."""
        self._graphs.clear()


def capture_graph(queue: DeviceQueue, record: Callable[[], None]) -> Replayable:
    """What `record` enqueues on the queue's stream, as a graph. Nothing is executed.

    Unlike torch.cuda.graph this does not wait for the device, which continues with its work.
    """
    assert queue.stream is not None, "graphs are captured on a GPU"
    graph = torch.cuda.CUDAGraph()
    with device_errors("capturing a CUDA graph"), queue.scope():
        # thread_local: other threads may use CUDA meanwhile.
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            record()
        finally:
            graph.capture_end()
    return _Graph(graph, queue)


def capture_when(
    is_ready: Callable[[], bool],
    capture: Callable[[Callable[[], None]], Replayable],
    record: Callable[[], None],
) -> Replayable:
    """A graph of `record`, captured as soon as `is_ready`; until then a replay enqueues the work
    again."""
    return capture(record) if is_ready() else _Deferred(is_ready, capture, record)


class _Deferred:
    """What is not captured yet."""

    def __init__(
        self,
        is_ready: Callable[[], bool],
        capture: Callable[[Callable[[], None]], Replayable],
        record: Callable[[], None],
    ) -> None:
        self._is_ready = is_ready
        self._capture = capture
        self._record = record
        self._graph: Replayable | None = None

    def replay(self) -> None:
        if self._graph is None and self._is_ready():
            self._graph = self._capture(self._record)
        if self._graph is None:
            self._record()
        else:
            self._graph.replay()


@dataclass(frozen=True, slots=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    queue: DeviceQueue

    def replay(self) -> None:
        with device_errors("replaying a CUDA graph"), self.queue.scope():
            self.graph.replay()


def _power_of_two(count: int) -> int:
    return 1 << max(0, count - 1).bit_length()


def _extend(array: NDArray[np.int32], count: int, value: int) -> NDArray[np.int32]:
    """`array` with rows of `value` up to `count` rows."""
    padded = np.full((count, *array.shape[1:]), value, np.int32)
    padded[: len(array)] = array
    return padded
