"""Policies: which cached rows a layer attends to. A policy is one file here."""

from infinigen_jax.policies.base import Policy
from infinigen_jax.policies.full import Full
from infinigen_jax.policies.infinigen import InfiniGen

POLICIES = {"full": Full, "infinigen": InfiniGen}

__all__ = ["POLICIES", "Full", "InfiniGen", "Policy"]
