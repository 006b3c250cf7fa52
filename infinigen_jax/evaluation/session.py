"""What all sub-commands do: their common options, and one measurement for each configuration."""

import argparse
import dataclasses
import gc
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from infinigen_jax.cli.options import (
    OR_EMBEDDED,
    add_engine_options,
    options_without_effect,
    unused_options,
)
from infinigen_jax.evaluation.configurations import (
    Configuration,
    check,
    configurations,
    settings_of,
)
from infinigen_jax.evaluation.naming import name_columns
from infinigen_jax.evaluation.parts import Measurement, Parts
from infinigen_jax.evaluation.plots import checked_plot
from infinigen_jax.evaluation.report import percent, provenance, table
from infinigen_jax.files.output import checked_output, write_json
from infinigen_jax.numeric import whole_number

if TYPE_CHECKING:
    from infinigen_jax.engine.engine import Engine
    from infinigen_jax.evaluation.scoring import Traffic
    from infinigen_jax.loading.load import Model

# Measures a configuration; is given the engine and a function to call with work done.
Measure = Callable[["Engine", Callable[[int], object]], Measurement]
NOT_COMPARED = ("date",)  # of the provenance: the numbers do not depend on it


def add_common_options(parser: argparse.ArgumentParser, batch: int, of: str) -> None:
    """The options of every sub-command: model, configurations, results.

    Args:
        batch: default of --batch.
        of: what a batch is made of.
    """
    add = parser.add_argument
    add("--model", metavar="DIR", help=f"converted or Hugging Face folder, {OR_EMBEDDED}")
    add(
        "--batch",
        type=whole_number(1),
        default=batch,
        metavar="B",
        help=f"{of} at once (default {batch}); only infinigen-paper's result depends on it",
    )
    add_engine_options(parser, several=True)
    add("--no-reference", action="store_true", help="without the full cache as the first line")
    add(
        "--json",
        metavar="F",
        help="write everything that was measured to a file; the same command goes on where it was "
        "interrupted",
    )
    add("--plot", metavar="F", help="draw the result: .png, .svg or .pdf; needs matplotlib")
    add("--quiet", action="store_true", help="no progress on stderr")


@dataclasses.dataclass
class Session:
    """One run of a sub-command.

    Attributes:
        chosen: configurations; the full cache is the first, unless it is not wanted.
        folder: that the model was loaded from.
        record: what the result file says, in the making.
    """

    arguments: argparse.Namespace
    chosen: list[Configuration]
    output: Path | None
    plot: Path | None
    say: Callable[[str], None]
    record: dict[str, Any]
    folder: Any = None
    parts: Parts | None = None

    @classmethod
    def of(cls, arguments: argparse.Namespace, say: Callable[[str], None]) -> "Session":
        """Check the common options, before anything is loaded."""
        chosen = configurations(arguments, reference=not arguments.no_reference)
        for line in unused_options(arguments):
            say(line)
        return cls(
            arguments,
            chosen,
            checked_output("--json", arguments.json),
            checked_plot(arguments.plot),
            say,
            {"command": arguments.command},
        )

    def load(self) -> "Model":
        """The model, and whether it can have all configurations."""
        from infinigen_jax.files.user_cache import keep_programs
        from infinigen_jax.loading.load import load, model_folder
        from infinigen_jax.machine.backend import widen_pinned_pool

        self.folder = model_folder(self.arguments.model)
        widen_pinned_pool()
        keep_programs()
        given = self.arguments
        model = load(self.folder, given.dtype, notify=self.say, weights=given.weights)
        check(self.chosen, model)
        if len(model.config.sliding_layers) == model.config.num_layers:
            self.say("all layers attend to a window that the device keeps: nothing is selected")
        return model

    def measure(self, model: "Model", measure: Measure, total: int, unit: str) -> "Iterator[Line]":
        """One measurement for each configuration; what was finished before is not repeated.

        A configuration is measured when its line is asked for.

        Args:
            total: work of one configuration, for the progress.
        """
        made = provenance(model, self.folder or "")
        self.record |= made
        self.parts = Parts(
            self.output, self.record | {name: None for name in NOT_COMPARED if name in made}
        )
        return measurements(
            model, self.chosen, measure, total, unit, self.arguments, self.say, self.parts
        )

    def finish(self, lines: list[dict[str, Any]]) -> None:
        """Write the result file."""
        if self.output is not None:
            write_json("--json", self.output, self.record | {"configurations": lines})
        if self.parts is not None:
            self.parts.remove()


@dataclasses.dataclass
class Line:
    """A configuration with its measurement.

    Attributes:
        described: policy, settings, and whether it is the reference.
    """

    described: dict[str, Any]
    measured: Measurement


def measurements(
    model: "Model",
    chosen: list[Configuration],
    measure: Measure,
    total: int,
    unit: str,
    arguments: argparse.Namespace,
    say: Callable[[str], None] = lambda message: None,
    parts: Parts | None = None,
) -> Iterator[Line]:
    """One measurement for each configuration, in turn; one engine lives at a time.

    Nothing for what comes to the same as a configuration before, on this model and device.
    """
    parts = parts or Parts(None, {})
    known: set[Any] = set()
    told: set[str] = set()
    for number, configuration in enumerate(chosen, 1):
        started = time.perf_counter()
        engine = configuration.engine(model)
        settings = settings_of(engine)
        described = {
            "policy": configuration.policy.name,
            "reference": number == 1 and not arguments.no_reference,
            "settings": settings,
        }
        title = f"{number}/{len(chosen)} {configuration.label}"
        key = {"policy": configuration.policy.name} | settings
        for line in options_without_effect(configuration.options, engine):
            if line not in told:
                say(f"{title}: {line}")
                told.add(line)
        if (same := tuple(sorted(key.items()))) in known:
            say(f"{title}: the same as a line before")
            del engine
            gc.collect()
            continue
        known.add(same)
        measured = parts.load(key)
        if measured is not None:
            say(f"{title}: measured before")
        else:
            with tqdm(
                total=total, desc=title, unit=f" {unit}", disable=arguments.quiet
            ) as progress:
                measured = measure(engine, progress.update)
            seconds = {"seconds": time.perf_counter() - started}
            measured = measured._replace(values=measured.values | seconds)
            parts.save(key, measured)
        yield Line(described, measured)
        del engine
        gc.collect()  # the device's arrays go before the next engine's come


def traffic_of(traffic: "Traffic") -> dict[str, Any]:
    """What moved, per token."""
    tokens, rows = max(traffic.tokens, 1), traffic.selected_rows
    return {
        "selected_fraction": traffic.selected / tokens,
        "fetched_fraction": traffic.fetched / tokens,
        "attended_fraction": traffic.attended / tokens,
        "hot_set_hit_rate": 1 - traffic.fetched_rows / rows if rows else 0.0,
        "host_to_device_bytes_per_token": traffic.moved_bytes / tokens,
        "host_cache_bytes": traffic.host_cache_bytes,
        "device_index_bytes": traffic.device_index_bytes,
        "hot_set_bytes": traffic.hot_set_bytes,
    }


SHARES = ["selected", "fetched"]
TRAFFIC = ["hot hits", "moved/token", "host cache", "index size", "seconds"]


def result_table(
    lines: list[dict[str, Any]], head: list[str], cells: Callable[[dict[str, Any]], list[str]]
) -> str:
    """The table for stdout: names, share of rows, quality, traffic.

    Args:
        head, cells: of the columns of quality.
    """
    names, of_line = name_columns(lines)
    rows = [
        [
            *own,
            percent(line["selected_fraction"]),
            percent(line["fetched_fraction"]),
            *cells(line),
            *_traffic_cells(line),
        ]
        for own, line in zip(of_line, lines, strict=True)
    ]
    return table([*names, *SHARES, *head, *TRAFFIC], rows, text_columns=len(names))


def _traffic_cells(line: dict[str, Any]) -> list[str]:
    """The cells of TRAFFIC."""
    from infinigen_jax.machine.memory_limits import format_bytes

    return [
        percent(line["hot_set_hit_rate"], 1),
        format_bytes(int(line["host_to_device_bytes_per_token"])),
        format_bytes(line["host_cache_bytes"]),
        format_bytes(line["device_index_bytes"]),
        f"{line['seconds']:.1f}",
    ]
