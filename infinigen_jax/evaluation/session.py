"""Session of a sub-command: common options, and one measurement for each configuration."""

import argparse
import dataclasses
import gc
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from infinigen_jax.cli.options import (
    add_engine_options,
    add_model_options,
    load_settings,
    options_without_effect,
    unused_options,
)
from infinigen_jax.evaluation.configurations import (
    Configuration,
    check,
    configurations,
    settings_of,
)
from infinigen_jax.evaluation.parts import Measurement, Parts
from infinigen_jax.evaluation.report import name_columns, percent, provenance, table
from infinigen_jax.files.output import checked_output, write_json
from infinigen_jax.messages import format_bytes
from infinigen_jax.numeric import whole_number

if TYPE_CHECKING:
    from infinigen_jax.engine.engine import Engine
    from infinigen_jax.evaluation.scoring import Traffic
    from infinigen_jax.loading.load import Model

# Measurement of a configuration, given its engine and `advance`, a function to call with the
# number of items done since the last call.
Measure = Callable[["Engine", Callable[[int], object]], Measurement]


def add_common_options(parser: argparse.ArgumentParser, batch: int, of: str) -> None:
    """Add the options of every sub-command; `of` names the elements of a batch."""
    add = parser.add_argument
    add_model_options(add)
    add(
        "--batch",
        type=whole_number(1),
        default=batch,
        metavar="B",
        help=f"{of} per batch (default {batch}); affects the result of a mean count, as in "
        "infinigen-paper, and on a GPU of rows in int8 or int4",
    )
    add_engine_options(parser, several=True)
    add("--no-reference", action="store_true", help="leave out the full cache, the first line")
    add(
        "--json",
        metavar="F",
        help="file for all measurements; the same command resumes after an interruption",
    )
    add("--quiet", action="store_true", help="no progress on stderr")


@dataclasses.dataclass
class Session:
    """Run of a sub-command.

    The full cache is the first configuration, unless --no-reference is given. `record` becomes the
    result file.
    """

    arguments: argparse.Namespace
    chosen: list[Configuration]
    output: Path | None
    say: Callable[[str], None]
    record: dict[str, Any]
    folder: Any = None
    parts: Parts | None = None

    @classmethod
    def of(cls, arguments: argparse.Namespace, say: Callable[[str], None]) -> "Session":
        """Check the common options before loading anything."""
        chosen = configurations(arguments, reference=not arguments.no_reference)
        for line in unused_options(arguments):
            say(line)
        output = checked_output("json", arguments.json)
        return cls(arguments, chosen, output, say, {"command": arguments.command})

    def load(self) -> "Model":
        """Load the model and check that it supports all configurations."""
        from infinigen_jax.files.user_cache import keep_programs
        from infinigen_jax.loading.load import load, model_folder
        from infinigen_jax.machine.backend import claim_memory

        self.folder = model_folder(self.arguments.model, self.arguments.revision)
        claim_memory()
        keep_programs()
        settings: dict[str, Any] = load_settings(self.arguments) | {"revision": None}
        model = load(self.folder, notify=self.say, **settings)
        check(self.chosen, model)
        if len(model.config.sliding_layers) == model.config.num_layers:
            self.say("all layers attend to a window that the device keeps: nothing is selected")
        return model

    def measure(
        self, model: "Model", measure: Measure, total: int, unit: str
    ) -> Iterator[Measurement]:
        """Yield one measurement per configuration, described by its values, when it is requested.

        One engine exists at a time. Configurations that have the same effect as an earlier one, on
        this model and device, are skipped, and finished measurements are not repeated.
        """
        from infinigen_jax.programs.program import environment, is_foreign

        self.record |= provenance(model, self.arguments.model or self.folder or "")
        self.parts = Parts(self.output, self.record | {"date": None, "source": environment()})
        known: set[Any] = set()
        told: set[str] = set()
        for index, configuration in enumerate(self.chosen, 1):
            started = time.perf_counter()
            engine = configuration.engine(model)
            settings = settings_of(engine)
            described = {
                "policy": configuration.policy.name,
                "reference": index == 1 and not self.arguments.no_reference,
                "settings": settings,
            }
            title = f"{index}/{len(self.chosen)} {configuration.label}"
            kind = type(configuration.policy)
            key = {"policy": f"{kind.__module__}:{kind.__qualname__}"} | settings
            for line in options_without_effect(configuration.options, engine):
                if line not in told:
                    self.say(f"{title}: {line}")
                    told.add(line)
            if (same := tuple(sorted(key.items()))) in known:
                self.say(f"{title}: equal to an earlier line")
                del engine
                gc.collect()
                continue
            known.add(same)
            # A user's policy may have changed since.
            measured = None if is_foreign(engine.decoder.policy) else self.parts.load(key)
            if measured is not None:
                self.say(f"{title}: measured before")
            else:
                with tqdm(
                    total=total, desc=title, unit=f" {unit}", disable=self.arguments.quiet
                ) as progress:
                    measured = measure(engine, progress.update)
                seconds = {"seconds": time.perf_counter() - started}
                measured = measured._replace(values=measured.values | seconds)
                self.parts.save(key, measured)
            yield measured._replace(values=described | measured.values)
            del engine
            gc.collect()  # free the device's arrays before the next engine

    def finish(
        self,
        lines: list[dict[str, Any]],
        head: list[str],
        cells: Callable[[dict[str, Any]], list[str]],
    ) -> None:
        """Write the result file and print the table; see `result_table`."""
        if self.output is not None:
            write_json("json", self.output, self.record | {"configurations": lines})
        if self.parts is not None:
            self.parts.remove()
        print(result_table(lines, head, cells), flush=True)


def traffic_of(traffic: "Traffic") -> dict[str, Any]:
    """Return the traffic per token."""
    attended = traffic.attended / max(traffic.tokens, 1)
    return traffic.per_token() | {"attended_fraction": attended}


SHARES = ["selected", "fetched"]
TRAFFIC = ["hot hits", "moved/token", "host cache", "index size", "seconds"]


def result_table(
    lines: list[dict[str, Any]], head: list[str], cells: Callable[[dict[str, Any]], list[str]]
) -> str:
    """Format the table for stdout: names, share of rows, quality (`head`, `cells`), traffic."""
    names, of_line = name_columns(lines)
    rows = [
        [
            *naming_cells,
            percent(line["selected_fraction"]),
            percent(line["fetched_fraction"]),
            *cells(line),
            percent(line["hot_set_hit_rate"], 1),
            format_bytes(int(line["host_to_device_bytes_per_token"])),
            format_bytes(line["host_cache_bytes"]),
            format_bytes(line["device_index_bytes"]),
            f"{line['seconds']:.1f}",
        ]
        for naming_cells, line in zip(of_line, lines, strict=True)
    ]
    return table([*names, *SHARES, *head, *TRAFFIC], rows, text_columns=len(names))
