"""Messages on stderr: when they are printed, and the speed that they state."""

import sys
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from infinigen_jax import messages
from infinigen_jax.cli.dialogue import rate
from infinigen_jax.messages import Messages


def test_work_that_takes_long_is_announced(monkeypatch, capsys):
    monkeypatch.setattr(messages, "PATIENCE", 0.01)
    for quiet in (False, True):
        say = Messages(quiet)
        with say.working("loading it"):
            time.sleep(0.2)
        with say.working("something short"):
            pass
        assert list(say.decoding(range(3))) == [0, 1, 2]
        assert capsys.readouterr().err == ("" if quiet else "loading it ...\n")
    for say.quiet, say.kept in ((False, False), (False, True)):
        with say.working(messages.READING):
            time.sleep(0.2)
        assert (messages.KEPT in capsys.readouterr().err) == say.kept


def test_no_message_interrupts_a_line_at_a_terminal(monkeypatch, capsys):
    """The first step is passed on with the second one, which may compile."""
    for terminal in (False, True):
        for stream in (sys.stdout, sys.stderr):
            monkeypatch.setattr(stream, "isatty", lambda terminal=terminal: terminal)
        made: list[int] = []
        steps = Messages().decoding(made.append(i) or i for i in range(3))
        assert next(steps) == 0 and made == ([0, 1] if terminal else [0])
        assert list(steps) == [1, 2]
        assert list(Messages().decoding([5])) == [5] and not list(Messages().decoding([]))


@pytest.mark.parametrize("steps, said", [(2, ""), (3, ", 2.0 tokens/s")])
def test_a_speed_leaves_compilation_out(steps, said):
    """The first decode step compiles, and may be the only one."""
    stats = SimpleNamespace(decode_seconds=0.5, decode_tokens_per_second=2.0)
    run = SimpleNamespace(clock=SimpleNamespace(steps=steps), stats=lambda: stats)
    assert rate(cast(Any, run)) == said
