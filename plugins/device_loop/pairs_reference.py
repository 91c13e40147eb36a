"""What a head that attends reads after a round, request by request.

Pair i is what the target computed for token i, and token i + 1 (runtime/drafting/eagle/pairs.py).
A verification has computed its rows from the root on, and the target has drawn what follows each:

    rows of the verification    r  d1 d2 d3        d1 accepted, then x
    the target's draws          d1 x  .  .
    pairs                      (r d1) (d1 x)

So every row makes a pair with the target's draw there, in the row's own place; that of the last
accepted draft is the last one. Those behind it are of tokens that were not accepted: they are
written over by the pairs of drafts, before anything sees them.
"""

from __future__ import annotations

from llmctl.plugins.backends.cuda.kernel_spec import DeviceStep
from llmctl.plugins.device_loop.state import RoundState


def read_pairs(
    state: RoundState,
    pairs: RoundState,
    verified: DeviceStep,
    step: DeviceStep,
    batch: int,
    draft_len: int,
) -> None:
    """Describe the step that reads them, after acceptance; its rows are the last pairs.

    verified: the step of the verification. pairs: the state as a head sees it, with a pair less
    than there are tokens for `committed`, which is brought up to date.
    """
    count = draft_len + 1
    real = [b for b in range(batch) if state.committed[b] > 0]
    padding = [b for b in range(batch) if state.committed[b] == 0]
    tokens = batch * count
    for place, request in enumerate(real + padding):
        first, committed, accepted = place * count, int(state.committed[request]), 0
        step.token_ids[first : first + count] = 0
        if place < len(real):
            drawn = state.targets[request * count : (request + 1) * count]
            step.token_ids[first : first + count] = drawn
            accepted = committed - 2 - int(verified.position_ids[first])
        step.logit_rows[request] = first + accepted
        pairs.committed[request] = max(committed - 1, 0)
    step.position_ids[:tokens] = verified.position_ids[:tokens]
    step.slot_mapping[:tokens] = verified.slot_mapping[:tokens]
    step.cu_q[: batch + 1] = verified.cu_q[: batch + 1]
    step.kv_len[:batch] = verified.kv_len[:batch]
