"""The kernel of lookahead decoding in the interpreter: rounds in which it drafts what the host's
window and pool draft, which tests of runtime/drafting/ compare with a Jacobi iteration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from support import lookahead_kernel
from support.lookahead_kernel import Rounds

from llmctl.builder.engine_format import LookaheadDecodingConfig
from llmctl.plugins.backends.cuda.compiler import compile_kernel
from llmctl.plugins.backends.cuda.interpret import run_launches
from llmctl.plugins.backends.cuda.kernel_spec import Launch
from llmctl.plugins.backends.cuda.queue import DeviceQueue
from llmctl.plugins.device_loop.state import RoundState
from llmctl.plugins.device_loop.trees import DraftTrees
from llmctl.plugins.ops.lookahead import kernel
from llmctl.plugins.ops.lookahead.arrays import LookaheadArrays, LookaheadSizes, lookahead_bytes

SIZES = [
    [(3, 3, 2), (2, 2, 1), (3, 4, 0)],
    [(4, 4, 3)],
    [(1, 2, 3), (1, 4, 1), (2, 3, 2), (5, 2, 0)],
    [(1, 3, 0), (5, 3, 5)],
]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_round_drafts_what_the_host_would(sizes, seed):
    """Requests of different sizes; rows that change places; rounds with fewer drafts, or none."""
    configs = [LookaheadDecodingConfig(*own) for own in sizes]
    most = max(config.max_draft_len for config in configs)
    num_rounds, accepted = Rounds(configs, seed, most, run_launches).play(25)
    assert num_rounds > 8 and accepted > 0


def test_rounds_do_everything_on_the_stream_that_uploads_are_on(monkeypatch):
    """On another one a GPU read slots and windows before they had arrived."""

    class Watched(DeviceQueue):
        is_current = False

        @contextmanager
        def scope(self) -> Iterator[None]:
            self.is_current = True
            yield
            self.is_current = False

        def to_device(self, array: torch.Tensor) -> torch.Tensor:
            assert self.is_current
            return super().to_device(array)

    monkeypatch.setattr(lookahead_kernel, "DeviceQueue", Watched)

    def launch(launches: Sequence[Launch]) -> None:
        assert rounds.queue.is_current
        run_launches(launches)

    rounds = Rounds([LookaheadDecodingConfig(3, 3, 2)], 0, 8, launch)
    assert rounds.play(9)[0] == 9


@pytest.mark.parametrize(
    ("sizes", "draft_len"), [((15, 5, 15), 119), ((7, 7, 7), 83), ((2, 2, 1), 2), ((1, 2, 3), 300)]
)
def test_the_kernel_compiles_without_spills(sizes, draft_len):
    own = LookaheadSizes(*sizes)
    (spec,) = kernel.kernels(own, draft_len)
    assert compile_kernel(spec).local_bytes == 0
    state, trees = (
        RoundState.allocate(2, draft_len, "cpu"),
        DraftTrees.allocate(2, draft_len, "cpu"),
    )
    arrays = LookaheadArrays.allocate(own, 2, draft_len, "cpu")
    launch = kernel.look_ahead(state, trees, arrays, 2, draft_len)
    assert launch.spec == spec and len(launch.arguments) == len(spec.arguments)
    assert lookahead_bytes(own, 2, draft_len) == sum(t.nbytes for t in arrays.tensors)
