"""Perplexity with and without skewing (the paper's figure 13), by share of the key's columns.

The settings are the paper's, except that alpha is infinite: the budget selects 20 % of the rows,
scored by a share of the columns. `none` takes the keys' columns in order of the norm of the
calibration queries, `svd` is the paper's basis, and `balanced` is this package's. The model must be
converted with `--skew balanced`, which keeps the weights unchanged and stores both bases.
"""

import argparse
import copy
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.figures.common import TITLES, add_evaluation_options, finish, level, measure, over
from benchmarks.plots import Panel
from benchmarks.shapes import with_plain_matrices
from infinigen_jax.convert.calibrate import DEFAULT_TEXT, Calibrator, tokenized_file
from infinigen_jax.errors import InputError
from infinigen_jax.evaluation.session import Session
from infinigen_jax.loading.load import Basis, Model
from infinigen_jax.numeric import OneOf, listed

SUMMARY = "with and without skewing (figure 13)"
BASES = ("none", "svd", "balanced")
RATIOS = (0.1, 0.2, 0.3, 0.5, 1.0)
CALIBRATION_TOKENS = 2048


def add_options(parser: argparse.ArgumentParser) -> None:
    policy = ["infinigen-paper:alpha=inf,budget=0.2"]
    add_evaluation_options(parser, tasks=True, policy=policy, partial_ratio=list(RATIOS))
    add = parser.add_argument
    add("--bases", nargs="+", type=OneOf(BASES), default=BASES, metavar="B", help=listed(BASES))


class Unskewed(Session):
    """A session whose model has a permutation of the keys' columns instead of the paper's basis."""

    def load(self) -> Model:
        return unskewed(super().load(), self.folder)


def run(arguments: argparse.Namespace, say: Callable[[str], None]) -> None:
    skewed = [basis for basis in arguments.bases if basis != "none"]
    session, lines, quality = None, [], ""
    if skewed:
        session = Session(_with_bases(arguments, skewed), say)
        lines, quality = measure(session)
    if "none" in arguments.bases:
        session = Unskewed(_with_bases(arguments, ["svd"]), say)
        session.record["basis"] = "none"  # separates its parts from those of the paper's basis
        plain, quality = measure(session)
        del session.record["basis"]
        for line in plain:
            if not line["reference"]:
                line["settings"]["basis"] = "none"
        # The reference is the same with either model.
        lines += [line for line in plain if not (lines and line["reference"])]
    assert session is not None
    curves = level(lines, quality, arguments.partial_ratio) | over(
        [line for line in lines if "basis" in line["settings"]],
        lambda line: line["settings"]["basis"],
        lambda line: line["settings"]["partial_ratio"],
        quality,
    )
    panel = Panel("columns in the index, share", TITLES[quality], curves)
    finish(session, lines, "figure 13", [panel])


def _with_bases(arguments: argparse.Namespace, bases: Sequence[str]) -> argparse.Namespace:
    changed, pairs = copy.copy(arguments), itertools.product(arguments.policy, bases)
    changed.policy = [f"{name}{',' if ':' in name else ':'}basis={basis}" for name, basis in pairs]
    return changed


def unskewed(model: Model, folder: Any) -> Model:
    """Replace the paper's basis by the keys' columns, those with the longest queries first."""
    if model.skew != "balanced":
        raise InputError(f"--model: it was converted with --skew {model.skew}; use balanced")
    config, plain = model.config, with_plain_matrices(model).params
    tokens = tokenized_file(DEFAULT_TEXT, model.tokenizer, config, CALIBRATION_TOKENS)
    embedding, *layers = (
        jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), tree)
        for tree in (plain["embedding"], *plain["layers"])
    )
    calibrator = Calibrator(config, tokens, embedding)
    bases = []
    for layer in layers:
        energies = np.einsum("kdd->kd", calibrator.layer(layer).query_gram)
        order = np.argsort(-energies, axis=1, kind="stable")
        columns = np.eye(config.head_dim, dtype=np.float32)[order].swapaxes(1, 2)
        bases.append(Basis(jnp.asarray(columns), jnp.asarray(columns)))
    return dataclasses.replace(model, svd_bases=tuple(bases))
