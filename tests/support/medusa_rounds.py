"""An engine with heads on a device made of fakes, and rounds that draft from them."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch

from llmctl.builder.engine_format import MedusaTree
from llmctl.runtime.drafting.medusa.device import DeviceMedusa
from llmctl.runtime.drafting.medusa.drafter import MedusaDrafter
from llmctl.runtime.rounds.cuda_rounds import CudaRoundRunner
from support.cuda_rounds import Capture, OnDevice, Program
from support.fake_engine import FakeEngine
from support.fake_heads import FakeHeads, HeadedEngine
from support.fake_loop import Harness


class HeadedProgram(Program):
    """Notes which tokens each row was computed from."""

    def enqueue(self, shape, stream: int) -> None:
        self.engine.row_tokens = []
        super().enqueue(shape, stream)

    def skip_row(self) -> None:
        self.engine.row_tokens.append(np.zeros(1, np.int64))


class DeviceEngine(OnDevice, HeadedEngine):
    """Has what a runner and a drafter ask of a CudaEngine with heads."""

    def __init__(self, tree: MedusaTree, right_rank: int, agreement: float, **options) -> None:
        super().__init__(vocab_size=23, **options)
        self.compute, self.logits_after = self.logits_after, self._logits_of_row
        self.program = HeadedProgram(self)
        self.head_rows = torch.full((self.max_num_rows,), -1, dtype=torch.int32)
        self.heads = FakeHeads(
            SimpleNamespace(logits=self.compute, max_batch_size=self.max_batch_size),
            tree.depth,
            right_rank,
            agreement,
        )
        self.head_logits = [
            torch.zeros(self.max_batch_size, self.vocab_size) for _ in range(tree.depth)
        ]

    def _logits_of_row(self, tokens) -> np.ndarray:
        self.row_tokens.append(np.asarray(tokens, np.int64))
        return self.compute(tokens)

    def run(self, step) -> np.ndarray:
        logits, self.logits = self.logits, self.logits_after
        self.row_tokens = []
        try:
            return super(HeadedEngine, self).run(step)
        finally:
            self.logits = logits

    def top_tokens(self, rows, count):
        """Of the heads, for the host."""
        self.heads.engine.row_tokens = self.row_tokens
        return self.heads.top_tokens(rows, count)

    def prepare_head(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(logit_rows=self.head_rows)

    def head_output(self, name: str, output: str) -> torch.Tensor:
        return self.head_logits[int(output.rpartition(".")[2])]

    def shared_logits(self, name: str, outputs: list[str]) -> None:
        """It has one rank."""

    def enqueue_head(self, name: str, num_rows: int, *, are_listed: bool) -> None:
        assert not are_listed

        def run() -> None:
            rows = self.head_rows[:num_rows].numpy()
            if not len(self.row_tokens):  # of padding alone
                return
            known = self.vocab_size - 1  # where a head is wrong, the right token comes last
            found = self.top_tokens(np.minimum(rows, len(self.row_tokens) - 1), known)
            for head, logits in enumerate(self.head_logits):
                order = torch.from_numpy(found[:, head])
                falling = torch.arange(known, 0, -1.0).expand(num_rows, -1)
                logits[:num_rows].zero_().scatter_(1, order, falling)

        self.program.launch([run], 0)


class MedusaDevice:
    """The engine, both drafters and the runner."""

    def __init__(
        self,
        tree: MedusaTree,
        *,
        right_rank: int = 0,
        agreement: float = 1.0,
        draft_len: int | None = None,
        lengths=(),
        max_batch_size: int = 4,
    ) -> None:
        most = max(tree.num_nodes, 2)
        self.target = DeviceEngine(
            tree,
            right_rank,
            agreement,
            max_draft_len=most,
            max_batch_size=max_batch_size,
            max_num_tokens=max_batch_size * (most + 1),  # as an engine is built
        )
        self.drafter = MedusaDrafter(self.target, tree, draft_len or tree.num_nodes)
        on_device = DeviceMedusa(self.target, tree, self.drafter.max_draft_len, self.drafter.rows)
        self.capture = Capture([self.target.program])
        self.runner = CudaRoundRunner(self.target, on_device, self.capture, lengths=lengths)

    def harness(self, **options) -> Harness:
        harness = Harness(self.target, self.drafter, runner=self.runner, **options)
        harness.oracle = FakeEngine(vocab_size=self.target.vocab_size)
        return harness
