"""Chat templates of model folders, rendered within limits of time, memory and length."""

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
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
        "memory": MEMORY,
        "characters": CHARACTERS,
    }
    result = _worker.run(task, seconds)
    if "error" in result:
        raise InputError(
            f"the chat template refuses this ({result['error']}); give another as `chat_template`"
        )
    return result["text"]


class Worker:
    """Process that renders templates, one at a time; it starts again if it has ended.

    Its import path is this process's. It ignores Python's environment variables, and ends with this
    process, whose end it reads from its input.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, task: dict[str, Any], seconds: float) -> dict[str, str]:
        """Return the result of a task, which may take this processor time."""
        line = f"{seconds} {json.dumps(task)}\n".encode()
        with self._lock:
            if self._process is not None and self._process.poll() is not None:
                self.close()
            process = self._process = self._process or self._start()
            assert process.stdin is not None and process.stdout is not None
            backstop = threading.Timer(BACKSTOP, os.killpg, [process.pid, signal.SIGKILL])
            backstop.start()
            try:
                process.stdin.write(line)
                process.stdin.flush()
                return json.loads(process.stdout.readline())
            except BaseException as error:  # also Ctrl-C: the next task would get this result
                late = backstop.finished.is_set()
                self.close()
                if late:
                    return {"error": f"it runs for more than {BACKSTOP} s"}
                if isinstance(error, OSError | ValueError):
                    return {"error": template_worker.ENDED}
                raise
            finally:
                backstop.cancel()

    def close(self) -> None:
        """End the process, if there is one."""
        process, self._process = self._process, None
        if process is not None:
            _end(process)

    def _start(self) -> "subprocess.Popen[bytes]":
        path = [str(Path(template_worker.__file__)), *filter(None, sys.path)]
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", START, *path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            process_group=0,  # Ctrl-C at a terminal is for this process
        )


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a worker and the task that it runs."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):  # of what is left to write
            assert pipe is not None
            pipe.close()
    process.wait()


_worker = Worker()
atexit.register(_worker.close)
