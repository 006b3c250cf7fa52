"""Loading of the engine that a command line's options ask for."""

import argparse
import os
from typing import TYPE_CHECKING

from infinigen_jax.cli.options import (
    DEFAULT_MODEL,
    load_settings,
    make_engine,
    make_policy,
    options_without_effect,
    unused_options,
)
from infinigen_jax.messages import Messages

if TYPE_CHECKING:
    from infinigen_jax.engine.engine import Engine


def load_engine(arguments: argparse.Namespace, say: Messages) -> "Engine":
    """Return the engine that the options ask for; `say` gets the options that have no effect."""
    if arguments.quiet:
        os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    with say.working(f"loading {arguments.model or DEFAULT_MODEL}"):
        from infinigen_jax.loading.load import load
        from infinigen_jax.machine.backend import widen_pinned_pool

        policy = make_policy(arguments)  # before the model is loaded, to report errors early
        for line in unused_options(arguments):
            say(line)
        widen_pinned_pool()
        model = load(arguments.model, notify=say, **load_settings(arguments))
        engine = make_engine(model, policy, arguments)
        for line in options_without_effect(arguments, engine):
            say(line)
    return engine
