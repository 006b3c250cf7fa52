"""Chat templates of model folders, rendered within limits of time, memory and length."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from infinigen_jax.errors import InputError
from infinigen_jax.text import template_worker

SECONDS = 1.0  # processor time; real templates take milliseconds
MEMORY = 512 << 20  # bytes of address space
CHARACTERS = 10_000_000
BACKSTOP = 60  # seconds wall time, for a process that gets no processor time
START = (
    "import runpy, sys; sys.path[:] = sys.argv[2:]; runpy.run_path(sys.argv[1], None, '__main__')"
)


def render_chat(
    template: str,
    messages: list[dict[str, Any]],
    special_tokens: dict[str, str],
    seconds: float = SECONDS,
    tools: list[dict[str, Any]] | None = None,
) -> str:
    """Render a chat template as `transformers` does, with a prompt for the next answer.

    Args:
        special_tokens: variables of the template, such as `bos_token`.
        seconds: limit of the template's processor time.
        tools: functions that the model may call, in OpenAI's format.
    """
    inputs = {
        "messages": messages,
        "tools": tools,
        "documents": None,
        "add_generation_prompt": True,
    }
    task = {
        "template": template,
        "variables": special_tokens | inputs,
        "seconds": seconds,
        "memory": MEMORY,
        "characters": CHARACTERS,
    }
    result = _run(task)
    if "error" in result:
        raise InputError(
            f"the chat template refuses this ({result['error']}); give another as `chat_template`"
        )
    return result["text"]


def _run(task: dict[str, Any]) -> dict[str, str]:
    """Run a task in a worker process and return its result.

    A fresh process, because a fork would inherit locks held by this process's threads. It uses this
    process's import path and ignores Python's environment variables.
    """
    command = [sys.executable, "-I", "-S", "-c", START]
    try:
        completed = subprocess.run(
            [*command, str(Path(template_worker.__file__)), *filter(None, sys.path)],
            input=json.dumps(task).encode(),
            capture_output=True,
            timeout=BACKSTOP,
            process_group=0,  # Ctrl-C at a terminal is for this process
        )
    except subprocess.TimeoutExpired:
        return {"error": f"it runs for more than {BACKSTOP} s"}
    if completed.returncode == -signal.SIGPROF:
        return {"error": f"it runs for more than {task['seconds']:g} s"}
    try:
        return json.loads(completed.stdout)
    except ValueError:
        return {"error": "its process ended, perhaps by too much memory or too deep a recursion"}
