"""Rendering chat templates in a process of their own (`cli/chat_process.py`), which has limits."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from llmctl.cli.chat_process import CPU_S
from llmctl.errors import TokenizerError
from llmctl.quantize.format import clipped

_WAIT_S = 300  # the imports of a slow machine; a template that computes is ended by CPU_S before


def render(
    template: str, special_tokens: Mapping[str, Any], messages: Sequence[str], where: str
) -> list[str | TokenizerError]:
    """A text for every user message, ready for the reply, or why there is none.

    special_tokens: what the template may name (bos_token, ...). where: the template's folder, for
    errors.
    """
    request = {"template": template, "special_tokens": special_tokens, "messages": messages}
    # -P: what lies in the current folder, perhaps the stranger's, is not imported.
    command = [sys.executable, "-P", "-m", "llmctl.cli.chat_process"]
    try:
        done = subprocess.run(
            command,
            input=json.dumps(request, default=str),
            capture_output=True,
            text=True,
            timeout=_WAIT_S,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
            check=False,
        )
    except subprocess.TimeoutExpired:
        return [_failed(where, f"it has not ended after {_WAIT_S} s")] * len(messages)
    if done.returncode:
        return [_failed(where, _ending(done))] * len(messages)
    answers = json.loads(done.stdout)
    return [
        answer["text"] if "text" in answer else _failed(where, clipped(answer["error"], 400))
        for answer in answers
    ]


def _ending(done: subprocess.CompletedProcess[str]) -> str:
    """Why the process has no answer."""
    if done.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        return f"it computes for more than {CPU_S} s"
    lines = done.stderr.strip().splitlines()
    return f"its process ended with {done.returncode}: {clipped(lines[-1] if lines else '', 400)}"


def _failed(where: str, reason: str) -> TokenizerError:
    return TokenizerError(
        f"the chat template in {where} fails: {reason}",
        fix="leave out --chat, or name another tokenizer with --tokenizer-dir",
    )
