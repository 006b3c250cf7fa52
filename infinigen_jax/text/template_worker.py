"""Program that renders chat templates; `templates` starts it. Imports nothing of the package.

A template of a model folder is untrusted code. Jinja's sandbox isolates it from the interpreter but
not from endless loops or excessive memory, and a single operation may run forever. Limits of the
operating system on a separate process stop all of them. Each task is a fork of this process, which
has imported Jinja and reads no task itself.
"""

import contextlib
import datetime
import functools
import json
import os
import resource
import signal
import sys
from typing import Any

FAILURE = 3  # exit status if no error can be reported
ENDED = "its process ended, perhaps by too much memory or too deep a recursion"


def limit(seconds: float, memory: int) -> None:
    """Limit the processor time and memory of this process."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, seconds)


def environment() -> Any:
    """Return a Jinja environment with the functions that transformers' chat templates use."""
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """Block `{% generation %}`, which marks an answer for training and changes nothing here."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    sandbox = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    sandbox.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    sandbox.globals["raise_exception"] = raise_exception
    sandbox.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return sandbox


def render(task: dict[str, Any]) -> dict[str, str]:
    """Return the text of a template, or the reason for its failure."""
    try:
        text = environment().from_string(task["template"]).render(task["variables"])
    except MemoryError:
        return {"error": "it takes too much memory"}
    except Exception as error:  # a template may raise anything
        return {"error": (str(error) or type(error).__name__)[:1000]}
    if len(text) > task["characters"]:
        return {"error": f"it makes more than {task['characters']} characters"}
    return {"text": text}


def run(task: bytes, seconds: float) -> bytes:
    """Run a task in a process of its own and return its result."""
    source, target = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            given = json.loads(task)
            limit(seconds, given["memory"])
            with os.fdopen(target, "w") as pipe:
                pipe.write(json.dumps(render(given)))
            os._exit(0)
        finally:
            os._exit(FAILURE)
    os.close(target)
    with os.fdopen(source, "rb") as pipe:
        result = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status == 0:
        return result
    slow = f"it runs for more than {seconds:g} s"
    return json.dumps({"error": slow if status == -signal.SIGPROF else ENDED}).encode()


def main() -> None:
    """Answer lines "SECONDS TASK" of stdin with lines of results; both are JSON."""
    with contextlib.suppress(ImportError):  # which every task reports
        environment()  # imports Jinja
    for line in sys.stdin.buffer:
        seconds, _, task = line.partition(b" ")
        sys.stdout.buffer.write(run(task, float(seconds)) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
