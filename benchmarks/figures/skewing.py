"""With and without skewing (the paper's figure 13): bases, by share of the key's columns.

The paper's settings, except that alpha leaves the choice to the budget: 20 % of the rows, scored by
a share of the columns. `none`: the keys' own columns, those with the longest calibration queries
first; `svd`: the paper's basis; `balanced`: this package's. The model must have been converted with
`--skew balanced`, which leaves the weights unchanged and stores both bases.
"""

import argparse
import copy
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.figures.common import add_options as add_evaluation_options
from benchmarks.figures.common import finish, level, measure, nothing, over
from infinigen_jax.errors import InputError
from infinigen_jax.evaluation.plots import Panel
from infinigen_jax.evaluation.session import Session

if TYPE_CHECKING:
    from infinigen_jax.loading.load import Model

SUMMARY = "with and without skewing (figure 13)"
BASES = ("none", "svd", "balanced")
RATIOS = (0.1, 0.2, 0.3, 0.5, 1.0)
CALIBRATION_TOKENS = 2048


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this figure."""
    add_evaluation_options(
        parser,
        tasks=True,
        policy=["infinigen-paper:alpha=inf,budget=0.2"],
        basis=list(BASES),
        partial_ratio=list(RATIOS),
    )


class Unskewed(Session):
    """A session whose model has a permutation of the keys' columns in place of the paper's basis.

    The package has no such basis.
    """

    def load(self) -> "Model":
        return unskewed(super().load(), self.folder)


def run(arguments: argparse.Namespace, say: Callable[[str], None]) -> None:
    """Measure, print the table and write the files."""
    bases = arguments.basis
    skewed = [basis for basis in bases if basis != "none"]
    made, lines = None, []
    if skewed or not bases:
        first = _with(arguments, basis=skewed)
        made = measure(first, Session.of(first, say))
        lines = made.lines
    if "none" in bases:
        again = _with(arguments, basis=["svd"])
        session = Unskewed.of(again, say)
        session.record["basis"] = "none"  # finished parts differ from those of the paper's basis
        made = measure(again, session)
        for line in made.lines:
            if not line["reference"]:
                line["settings"]["basis"] = "none"
        # The reference, with which lines are compared, is the same with either model.
        lines += made.lines if not lines else [x for x in made.lines if not x["reference"]]
        del session.record["basis"]
    assert made is not None
    curves = level(lines, made.quality, arguments.partial_ratio) | over(
        [line for line in lines if "basis" in line["settings"]],
        lambda line: line["settings"]["basis"],
        lambda line: line["settings"]["partial_ratio"],
        made.quality,
    )
    panel = Panel("columns in the index, share", made.title, curves)
    finish(made._replace(lines=lines), "figure 13", [panel], head=[], cells=nothing)


def _with(arguments: argparse.Namespace, **changes: Any) -> argparse.Namespace:
    changed = copy.copy(arguments)
    vars(changed).update(changes)
    return changed


def unskewed(model: "Model", folder: Any) -> "Model":
    """Replace the paper's basis by the keys' own columns, those with the longest queries first.

    Raises:
        InputError: for a model whose weights a conversion has skewed, or that has no bases.
    """
    from infinigen_jax.convert.calibrate import DEFAULT_TEXT, Calibrator, read_text
    from infinigen_jax.loading.load import Basis

    if model.skew != "balanced":
        raise InputError(f"--model: it was converted with --skew {model.skew}; use balanced")
    config = model.config
    tokens = read_text(DEFAULT_TEXT, model.path or folder, config, CALIBRATION_TOKENS)
    embedding, *layers = (
        jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), tree)
        for tree in (model.params["embedding"], *model.params["layers"])
    )
    calibrator = Calibrator(config, tokens, embedding)
    bases = []
    for layer in layers:
        energies = np.einsum("kdd->kd", calibrator.layer(layer).query_gram)
        order = np.argsort(-energies, axis=1, kind="stable")
        columns = np.eye(config.head_dim, dtype=np.float32)[order].swapaxes(1, 2)
        bases.append(Basis(jnp.asarray(columns), jnp.asarray(columns)))
    return dataclasses.replace(model, svd_bases=tuple(bases))
