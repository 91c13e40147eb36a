"""The calls of one engine that every rank makes: rank 0 makes them here and hands them on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from llmctl.builder.engine_format import Plan
from llmctl.runtime.ranks.commands import Command
from llmctl.runtime.ranks.leader import Leader

Result = TypeVar("Result")


class LedCalls:
    """`plan` is the engine's, `role` its name among the ranks' engines. Every method raises
    RankFailure once a rank is lost, and from then on."""

    def __init__(self, leader: Leader, role: str, plan: Plan) -> None:
        self._leader, self._role, self._plan = leader, role, plan

    def lead(self, call: str, argument: Any, method: Callable[[Any], Result]) -> Result:
        """method(argument) on every rank."""
        command = Command(self._role, call, argument)
        return self._leader.lead(command, lambda: method(argument))

    def allocate(self, call: str, num_blocks: int, method: Callable[[int], None]) -> None:
        """The same of memory, which any rank may lack: once this returns, every rank has it."""
        self.lead(call, num_blocks, method)
        self._leader.wait_for_all("allocated its memory")

    def lead_head(
        self, name: str, call: str, arguments: tuple[Any, ...], method: Callable[..., Result]
    ) -> Result:
        """method(*arguments) on every rank that has a part of this head; here alone where it is
        whole."""
        head = self._plan.heads.get(name)
        if head is None or not head.is_over_ranks:
            return method(*arguments)
        command = Command(self._role, call, arguments)
        return self._leader.lead(command, lambda: method(*arguments))
