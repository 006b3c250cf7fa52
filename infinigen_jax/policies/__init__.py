"""Policies: which cached rows a layer attends to. A policy is one file here."""

from infinigen_jax.policies.base import Policy
from infinigen_jax.policies.exact import Oracle, PreviousQuery
from infinigen_jax.policies.full import Full
from infinigen_jax.policies.h2o import H2O
from infinigen_jax.policies.infinigen import InfiniGen
from infinigen_jax.policies.infinigen_paper import InfiniGenPaper
from infinigen_jax.policies.quest import Quest
from infinigen_jax.policies.window import Window

KINDS = (Full, Window, H2O, Quest, InfiniGen, InfiniGenPaper, PreviousQuery, Oracle)
POLICIES = {kind.name: kind for kind in KINDS}

__all__ = ["POLICIES", "Policy", *(kind.__name__ for kind in KINDS)]
