"""Program that renders one chat template; started by `templates`, imports nothing of the package.

A template of a model folder is a program of somebody else's. Jinja's sandbox keeps it from the
interpreter, not from looping or from filling the memory, and a single operation may take for ever:
limits of the operating system on a process of its own hold for all of them.
"""

import datetime
import json
import os
import resource
import signal
import sys
from typing import Any

FAILURE = 3  # exit status when not even an error can be reported


def limit(seconds: float, memory: int) -> None:
    """Let the system end this process after some seconds of processor time.

    Args:
        memory: bytes of address space; more is a MemoryError.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, seconds)


def environment() -> Any:
    """A Jinja environment with the functions that chat templates of transformers use."""
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks an answer for training; here it changes nothing."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: Any = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    made.filters["tojson"] = tojson
    made.globals["raise_exception"] = raise_exception
    made.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return made


def render(task: dict[str, Any]) -> dict[str, str]:
    """Return the text of a template, or the reason why it has none."""
    try:
        text = environment().from_string(task["template"]).render(task["variables"])
    except MemoryError:
        return {"error": "it takes too much memory"}
    except Exception as error:  # whatever a template may raise
        return {"error": (str(error) or type(error).__name__)[:1000]}
    if len(text) > task["characters"]:
        return {"error": f"it makes more than {task['characters']} characters"}
    return {"text": text}


def main() -> None:
    """Read a task from stdin, write the result to stdout, both as JSON."""
    task = json.loads(sys.stdin.buffer.read())
    limit(task["seconds"], task["memory"])
    sys.stdout.write(json.dumps(render(task)))
    sys.stdout.flush()


if __name__ == "__main__":
    try:
        main()
    except BaseException:
        os._exit(FAILURE)
