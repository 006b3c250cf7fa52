"""Settings of the policies that have options on a command line.

Settings of other policies are in the policy's file. They follow its name: `quest:page=8`.
"""

import dataclasses
import math

from infinigen_jax.numeric import LEAST_SHARE, SHARE, OneOf, Range, whole_number
from infinigen_jax.settings.setting import Settings, setting

INDEX_DTYPES = ("auto", "float32", "bfloat16", "int4")
BASES = ("auto", "svd", "balanced")
QUERIES = ("auto", "plain", "corrected", "own")
# Hidden state that predicts the next layer's query: its predecessor's attention input, or the state
# after attention to the resident rows alone.
SOURCES = ("input", "resident")
LAYER_BUDGETS = ("auto", "equal", "calibrated")
COUNTS = ("head", "mean")
BLOCKS = tuple(2**i for i in range(8))  # sizes of blocks of tokens: divisors of every capacity
MOST_TAIL_COLUMNS = 16  # that the kernels can average


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResidentSettings(Settings):
    """Tokens that stay on the device."""

    sinks: int = setting(0, "first tokens kept on the device", "N", whole_number(0))
    window: int = setting(
        1, "recent tokens kept on the device, including the current one", "N", whole_number(1)
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class BudgetSettings(ResidentSettings):
    """Settings of a policy that fetches at most a share of the rows."""

    budget: float = setting(0.1, "maximum share of the cached rows to fetch", "F", SHARE)
    sinks: int = 4
    window: int = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class InfiniGenSettings(BudgetSettings):
    """Settings of InfiniGen (docs/policies-infinigen.md); those without an option follow its name.

    Attributes:
        index_dtype: "auto" is bfloat16, but float32 on the CPU. With int4, three quarters of the
            columns take little more memory than a fifth of them in bfloat16.
        count: "head" counts the rows that pass alpha for each KV head; "mean" takes the mean over
            all heads and sequences of the batch, as in the paper's code.
        streamed_layers: first layers without speculation; on the host they are streamed whole.
        basis: basis of the index; "auto" is the model's, "svd" the paper's.
        query: query that selects rows. "auto" is own, for which the layer waits, if attention reads
            rows in host memory, so that a prefetch has nothing to hide; else corrected, by a
            regression, if the model stores one; else plain, the paper's.
        speculate_from: hidden state that the query is predicted from. "auto" is the one that the
            model was converted for, else "input", the paper's. Ignored for an own query.
        layer_budgets: "auto" distributes the budget by the loss of each layer on calibration text
            (`speculation.layer_budgets`) if the conversion measured it; else it is "equal".
        tail: whether to attend to the mean of unfetched rows.
        tail_tokens: neighbouring tokens that share an entry of the tail. 0 combines all tokens;
            always 0 with a pool, whose neighbouring slots are unrelated.
        tail_columns: index columns that predict how a value differs from the mean of its
            neighbours, see `speculation.tail`. Always 0 if the conversion did not measure the
            moments, and with `tail_tokens` 0 or 1.
    """

    alpha: float = setting(
        4.0,
        "fetch rows that score within A of the best; the paper: 4 for OPT, 5 for LLaMA; inf: by "
        "the budget alone",
        "A",
        Range(LEAST_SHARE, math.inf),
    )
    partial_ratio: float = setting(
        0.75, "share of a key's columns in the index; int4 rounds up to whole words", "R", SHARE
    )
    index_dtype: str = setting("int4", check=OneOf(INDEX_DTYPES))
    count: str = setting("head", check=OneOf(COUNTS))
    streamed_layers: int = setting(0, check=whole_number(0))
    basis: str = setting("auto", check=OneOf(BASES))
    query: str = setting("auto", check=OneOf(QUERIES))
    speculate_from: str = setting("auto", check=OneOf(("auto", *SOURCES)))
    layer_budgets: str = setting("auto", check=OneOf(LAYER_BUDGETS))
    tail: bool = setting(True)
    tail_tokens: int = setting(64, check=OneOf((0, *BLOCKS)))
    tail_columns: int = setting(8, check=Range(0, MOST_TAIL_COLUMNS, whole=True))
