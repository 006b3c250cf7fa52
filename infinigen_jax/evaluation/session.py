"""Session of a sub-command: its options, and one measurement for each configuration.

Configurations are all combinations of the requested policies, budgets and formats.
"""

import argparse
import copy
import dataclasses
import gc
import hashlib
import itertools
import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from tqdm import tqdm

from infinigen_jax.cli.options import (
    POLICY_OPTIONS,
    add_engine_options,
    add_model_options,
    load_settings,
    make_engine,
    make_policy,
    make_pool,
    options_without_effect,
    policy_settings,
    unused_options,
)
from infinigen_jax.errors import InputError
from infinigen_jax.evaluation.report import name_columns, percent, provenance, table
from infinigen_jax.files.atomic import whole_file
from infinigen_jax.files.output import checked_output, is_open, write_json
from infinigen_jax.messages import format_bytes
from infinigen_jax.numeric import whole_number
from infinigen_jax.settings.pool import Pool

if TYPE_CHECKING:
    from infinigen_jax.engine.engine import Engine
    from infinigen_jax.loading.load import Model
    from infinigen_jax.policies import Policy

LISTS = ("policy", *POLICY_OPTIONS, "rows", "pool_tokens", "pool_eviction")


class Measurement(NamedTuple):
    """Raw arrays of a configuration, the basis of statistics, and entries of the result."""

    arrays: dict[str, np.ndarray]
    values: dict[str, Any]


# Measurement of a configuration, given its engine and `advance`, a function to call with the
# number of items done since the last call.
Measure = Callable[["Engine", Callable[[int], object]], Measurement]


@dataclasses.dataclass(frozen=True)
class Configuration:
    """Line of a result; `options` have single values, this line's, in place of lists."""

    policy: "Policy"
    rows: str
    pool: Pool | None
    options: argparse.Namespace = dataclasses.field(compare=False)

    @property
    def label(self) -> str:
        """Short label for progress and errors."""
        parts = [self.options.policy, getattr(self.policy, "budget", None)]
        for name in ("alpha", "partial_ratio"):
            value = getattr(self.options, name)
            if hasattr(self.policy, name) and value is not None:
                parts.append(f"{name} {value}")
        parts += [self.pool and self.pool.label, self.rows]
        return " ".join(str(part) for part in parts if part is not None)


def configurations(arguments: argparse.Namespace, *, reference: bool) -> list[Configuration]:
    """Return the distinct combinations of the list options; the policy varies slowest."""
    values = [getattr(arguments, name) or [None] for name in LISTS]
    combinations: list[Any] = list(itertools.product(*values))
    if reference:
        full = {"policy": "full", "rows": "auto", "pool_tokens": "all"}
        combinations.insert(0, tuple(full.get(name) for name in LISTS))
    distinct: dict[Configuration, None] = {}
    for combination in combinations:
        options = copy.copy(arguments)
        vars(options).update(zip(LISTS, combination, strict=True))
        policy, pool = make_policy(options), make_pool(options)
        if pool is not None and policy.name == "full":
            options.pool_eviction = "fifo"  # equal for all orders: every step uses every row
            pool = make_pool(options)
        distinct.setdefault(Configuration(policy, options.rows or "auto", pool, options))
    return list(distinct)


def add_common_options(parser: argparse.ArgumentParser, batch: int, of: str) -> None:
    """Add the options of every sub-command; `of` names the elements of a batch."""
    add = parser.add_argument
    add_model_options(add)
    size = (
        f"{of} per batch (default {batch}); affects the result of a mean count, as in "
        "infinigen-paper, and on a GPU of rows in int8 or int4"
    )
    add("--batch", type=whole_number(1), default=batch, metavar="B", help=size)
    add_engine_options(parser, several=True)
    add("--no-reference", action="store_true", help="leave out the full cache, the first line")
    file = "file for all measurements; the same command resumes after an interruption"
    add("--json", metavar="F", help=file)
    add("--quiet", action="store_true", help="no progress on stderr")


class Session:
    """Run of a sub-command, whose common options are checked before anything is loaded.

    The full cache is the first configuration, unless --no-reference is given. `record` becomes the
    result file.
    """

    def __init__(self, arguments: argparse.Namespace, say: Callable[[str], None]):
        self.arguments, self.say = arguments, say
        self.chosen = configurations(arguments, reference=not arguments.no_reference)
        for line in unused_options(arguments):
            say(line)
        self.output = checked_output("json", arguments.json)
        self.record: dict[str, Any] = {"command": arguments.command}
        self.folder: Any = None
        self.parts: Parts | None = None

    def load(self) -> "Model":
        """Load the model and check that it supports all configurations."""
        from infinigen_jax.cache.row_format import row_format
        from infinigen_jax.engine.runtime import curves_for
        from infinigen_jax.engine.settings import check_fitted, check_pool
        from infinigen_jax.files.user_cache import keep_programs
        from infinigen_jax.loading.load import load, model_folder
        from infinigen_jax.machine.backend import claim_memory
        from infinigen_jax.transfer import make_transfer

        self.folder = model_folder(self.arguments.model, self.arguments.revision)
        claim_memory()
        keep_programs()
        settings: dict[str, Any] = load_settings(self.arguments) | {"revision": None}
        model = load(self.folder, notify=self.say, **settings)
        in_place = make_transfer(self.arguments.transfer or "auto").in_place
        for configuration in self.chosen:  # refuse now what an engine would refuse later
            check_pool(configuration.pool, configuration.policy)
            fitted = configuration.policy.fitted(model, in_place, configuration.pool is not None)
            check_fitted(fitted, configuration.pool)
            curves_for(model, fitted)
            row_format(configuration.rows, model.dtype, model.config.head_dim)
        if len(model.config.sliding_layers) == model.config.num_layers:
            self.say("all layers attend to a window that the device keeps: nothing is selected")
        return model

    def measure(
        self, model: "Model", measure: Measure, total: int, unit: str
    ) -> Iterator[Measurement]:
        """Yield one measurement per configuration, described by its values, when it is requested.

        Configurations that have the same effect as an earlier one, on this model and device, are
        skipped, and finished measurements are not repeated.
        """
        from infinigen_jax.programs.program import environment, is_foreign

        self.record |= provenance(model, self.arguments.model or self.folder or "")
        self.parts = Parts(self.output, self.record | {"date": None, "source": environment()})
        known, told = set[Any](), set[str]()
        engine = None
        for index, configuration in enumerate(self.chosen, 1):
            del engine
            gc.collect()  # free the device's arrays before the next engine
            started = time.perf_counter()
            engine = make_engine(model, configuration.policy, configuration.options)
            settings = settings_of(engine)
            title = f"{index}/{len(self.chosen)} {configuration.label}"
            kind = type(configuration.policy)
            key = {"policy": f"{kind.__module__}:{kind.__qualname__}"} | settings
            for line in options_without_effect(configuration.options, engine):
                if line not in told:
                    self.say(f"{title}: {line}")
                    told.add(line)
            if (same := tuple(sorted(key.items()))) in known:
                self.say(f"{title}: equal to an earlier line")
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
            described = {
                "policy": configuration.policy.name,
                "reference": index == 1 and not self.arguments.no_reference,
                "settings": settings,
            }
            yield measured._replace(values=described | measured.values)
        del engine
        gc.collect()

    def finish(
        self,
        lines: list[dict[str, Any]],
        head: list[str],
        cells: Callable[[dict[str, Any]], list[str]],
    ) -> None:
        """Write the result file, and print the table with the columns `head` of the quality."""
        if self.output is not None:
            write_json("json", self.output, self.record | {"configurations": lines})
        if self.parts is not None:
            self.parts.remove()
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
        traffic = ["hot hits", "moved/token", "host cache", "index size", "seconds"]
        heads = [*names, "selected", "fetched", *head, *traffic]
        print(table(heads, rows, text_columns=len(names)), flush=True)


class Parts:
    """Finished measurements, kept next to the result file until it is written.

    Each configuration has one file, named by a hash of everything that its numbers depend on.

    Args:
        output: result file; parts lie in a folder of its name with the suffix ".parts". None keeps
            nothing.
        key: everything that all configurations have in common, ready for JSON.
    """

    def __init__(self, output: Path | None, key: dict[str, Any]):
        keeps = output is not None and not is_open(output)
        self.folder = output.with_name(f"{output.name}.parts") if output and keeps else None
        self.key = key

    def load(self, settings: dict[str, Any]) -> Measurement | None:
        """Return the measurement with these settings; None if missing or unreadable."""
        path = self._file(settings)
        if path is None or not path.is_file():
            return None
        try:
            # Open the file here, because `np.load` leaves a damaged file open.
            with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
                arrays = {name: stored[name] for name in stored.files}
                return Measurement(arrays, json.loads(str(arrays.pop("values"))))
        except Exception:  # a damaged archive can raise nearly anything
            return None  # it is measured again

    def save(self, settings: dict[str, Any], measured: Measurement) -> None:
        """Write a measurement, whole or not at all."""
        path = self._file(settings)
        if path is None:
            return
        try:
            path.parent.mkdir(exist_ok=True)
            with whole_file(path) as file:
                values: Any = {"values": np.array(json.dumps(measured.values))}
                np.savez(file, **(measured.arrays | values))
        except OSError as error:
            raise InputError(f"{path.parent}: {error.strerror}; make room") from None

    def remove(self) -> None:
        """Remove all parts once the result is written."""
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _file(self, settings: dict[str, Any]) -> Path | None:
        text = json.dumps([self.key, settings], sort_keys=True)
        name = hashlib.sha256(text.encode()).hexdigest()[:24]
        return self.folder and self.folder / f"{name}.npz"


def settings_of(engine: "Engine") -> dict[str, Any]:
    """Return all settings of an engine that its scores depend on, ready for JSON."""
    decoder = engine.decoder
    return policy_settings(decoder.policy) | {
        "rows": decoder.row_format.name,
        "pool": "all" if decoder.pool is None else decoder.pool.label,
        "dense_layers": decoder.dense_layers,
        "hot_set": decoder.hot_set,
        "transfer": decoder.transfer.name,
        # Quantised rows depend on where a prompt is divided.
        "prefill_chunk": engine.runtime.prefill_chunk or "auto",
    }
