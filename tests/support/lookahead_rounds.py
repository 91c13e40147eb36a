"""An engine on a device made of fakes, and rounds that draft from windows."""

from __future__ import annotations

from llmctl.builder.engine_format import LookaheadDecodingConfig
from llmctl.plugins.ops.lookahead.arrays import LookaheadSizes
from llmctl.runtime.drafting.lookahead.device import DeviceLookahead
from llmctl.runtime.drafting.lookahead.drafter import LookaheadDrafter
from llmctl.runtime.rounds.cuda_rounds import CudaRoundRunner
from support.cuda_rounds import Capture, OnDevice
from support.fake_engine import FakeEngine
from support.fake_loop import Harness

VOCAB = 23


class DeviceEngine(OnDevice, FakeEngine):
    """Verifies trees."""

    def __init__(self, **options) -> None:
        super().__init__(vocab_size=VOCAB, **options)


class LookaheadDevice:
    """The engine, both drafters and the runner. built: what the kernels are for, if larger."""

    def __init__(
        self,
        sizes: tuple[int, int, int],
        *,
        built: tuple[int, int, int] | None = None,
        max_batch_size: int = 3,
        whole_context: float = 0.0,
        lengths=(),
    ) -> None:
        config = LookaheadDecodingConfig(*sizes)
        own = LookaheadDecodingConfig(*(built or sizes))
        most = own.max_draft_len
        self.options = {"max_seq_len": 200, "whole_context": whole_context}
        self.target = DeviceEngine(
            max_draft_len=most,
            max_batch_size=max_batch_size,
            max_num_tokens=max_batch_size * (most + 1),
            **self.options,
        )
        self.drafter = LookaheadDrafter(config, config.max_draft_len)
        self.on_device = DeviceLookahead(
            self.target, LookaheadSizes(*own.sizes), config.max_draft_len, self.drafter
        )
        self.capture = Capture([self.target.program])
        self.runner = CudaRoundRunner(self.target, self.on_device, self.capture, lengths=lengths)

    def harness(self, *, on_device: bool = True, **options) -> Harness:
        runner = self.runner if on_device else None
        harness = Harness(self.target, self.drafter, runner=runner, **options)
        harness.oracle = FakeEngine(vocab_size=VOCAB, **self.options)
        return harness
