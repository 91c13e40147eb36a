"""The process that renders chat templates: programs of a model's author, who may be a stranger.

jinja's sandbox keeps a template from Python; this process keeps it from time and memory. It reads
a request from stdin and writes a list to stdout, an object a message: `text`, or `error`.
`cli/chat_template.py` starts it.
"""

from __future__ import annotations

import json
import os
import re
import resource
import sys
from pathlib import Path
from typing import Any

CPU_S = 2  # and for each message a hundredth more; a template takes a tenth of that
MEMORY_BYTES = 512 << 20  # beside what the process has before it reads the template
MOST_CHARS = 16 << 20  # of a rendered text


def main() -> None:
    """Serve one request: {template, special_tokens, messages}."""
    answer = os.dup(1)
    os.dup2(2, 1)  # whatever a library prints is no answer
    request: dict[str, Any] = json.load(sys.stdin)
    from transformers.utils.chat_template_utils import render_jinja_template

    _limit(CPU_S + len(request["messages"]) // 100)
    answers = []
    for message in request["messages"]:
        try:
            rendered: Any = render_jinja_template(
                conversations=[[{"role": "user", "content": message}]],
                chat_template=request["template"],
                add_generation_prompt=True,
                **request["special_tokens"],
            )
            answers.append(_answer(rendered[0][0]))
        except MemoryError:
            answers.append({"error": f"it needs more than {MEMORY_BYTES >> 20} MiB of memory"})
        except Exception as error:  # whatever the template raises
            answers.append({"error": str(error)[:1000] or type(error).__name__})
    with os.fdopen(answer, "w", encoding="utf-8") as file:
        json.dump(answers, file)


def _answer(text: str) -> dict[str, str]:
    if len(text) > MOST_CHARS:
        return {"error": f"it makes {len(text)} characters; at most {MOST_CHARS} are taken"}
    return {"text": text}


def _limit(cpu_s: int) -> None:
    """No more memory, processor time and files than rendering takes."""
    status = Path("/proc/self/status").read_text()
    found = re.search(r"^VmData:\s+(\d+) kB", status, re.MULTILINE)
    assert found is not None
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = int(used.ru_utime + used.ru_stime) + 1 + cpu_s
    limits = {
        resource.RLIMIT_DATA: int(found[1]) * 1024 + MEMORY_BYTES,
        resource.RLIMIT_CPU: seconds,
        resource.RLIMIT_FSIZE: 0,  # pipes are no files
        resource.RLIMIT_CORE: 0,
    }
    for kind, limit in limits.items():
        resource.setrlimit(kind, (limit, limit))


if __name__ == "__main__":
    main()
