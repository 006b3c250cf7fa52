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

    budget: float = setting(0.1, "most rows fetched, as a share of those cached", "F", SHARE)
    sinks: int = 4
    window: int = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class InfiniGenSettings(BudgetSettings):
    """Settings of InfiniGen; those without a command-line option follow the policy's name.

    Attributes:
        index_dtype: format of the index. "auto" is bfloat16, but float32 on the CPU. With int4,
            three quarters of the columns take little more memory than a fifth of them in bfloat16.
        count: "head" counts the rows that pass alpha for each KV head; "mean" takes the mean over
            all heads and sequences of the batch, as in the paper's code.
        streamed_layers: first layers without speculation; on the host they are streamed whole.
        basis: basis of the index, "svd" (the paper's) or "balanced"; "auto" is the model's.
        query: query that selects rows. "plain" is computed from the previous layer's unchanged
            input, as in the paper; "corrected" has a correction fitted on calibration text; "own"
            is the layer's true query, for which the layer waits. "auto" is own if attention reads
            rows in host memory, so that a prefetch has nothing to hide; else corrected if the model
            stores a correction, else plain.
        speculate_from: state that the query is predicted from. "resident", the state after
            attention to the resident rows, is a better guess than "input", the paper's, and waits
            for no transfer. "auto" is the source that the model was converted for, else "input".
            Ignored for an own query.
        layer_budgets: "calibrated" distributes the budget by the loss of each layer on calibration
            text (`speculation.layer_budgets`); "auto" does so if the conversion measured the
            losses, and is "equal" otherwise.
        tail: whether to attend to the mean of unfetched rows.
        tail_tokens: neighbouring tokens that share their mean value and the weight given by the
            layer's own query and the index. 0 combines all tokens and weighs them by the speculated
            scores; always 0 with a pool, whose neighbouring slots are unrelated.
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
