"""Policies: which cached rows a layer attends to. A policy is one file here."""

from infinigen_jax.policies.base import Policy
from infinigen_jax.policies.full import Full
from infinigen_jax.policies.infinigen import InfiniGen
from infinigen_jax.policies.infinigen_paper import InfiniGenPaper

POLICIES = {kind.name: kind for kind in (Full, InfiniGen, InfiniGenPaper)}

__all__ = ["POLICIES", "Full", "InfiniGen", "InfiniGenPaper", "Policy"]
