"""How often a model finds what stands far above, with its full cache.

An answer counts when every token of it is the likeliest one behind the right tokens before it,
which is when greedy generation gives exactly the answer.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.reference_models.synthetic import Lookup, Synthetic

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
MANY = 8  # facts in a sequence of "many": one asked for, the others like it

Predict = Callable[[np.ndarray], Any]  # tokens [b, s] -> the likeliest next tokens [b, s]


def needle_accuracy(
    predict: Predict,
    synthetic: Synthetic,
    lengths: Sequence[int],
    samples: int,
    seed: int = 0,
) -> dict[str, Any]:
    """Share of answers found: a single fact by length and depth, and several in one sequence.

    Args:
        predict: called with one sequence at a time; its length is one of `lengths`.
        samples: sequences of each kind, length and depth.
    """
    single, many = [], []
    for length in lengths:
        for kind in ("passkey", "pairs"):
            for place, depth in enumerate(DEPTHS):
                found = []
                for i in range(samples):
                    rng = np.random.default_rng([seed, length, place, i, kind == "pairs"])
                    sample = synthetic.lookups(rng, length, kind, 1, depth)
                    found += _found(predict, sample.tokens, sample.lookups)
                single.append(_row(kind, length, found) | {"depth": depth})
            found = []
            for i in range(samples):
                rng = np.random.default_rng([seed, length, i, kind == "pairs"])
                sample = synthetic.lookups(rng, length, kind, MANY)
                found += _found(predict, sample.tokens, sample.lookups)
            many.append(_row(kind, length, found))
    return {"samples": samples, "single": single, "many": many, "facts_of_many": MANY}


def _found(predict: Predict, tokens: np.ndarray, lookups: Sequence[Lookup]) -> list[bool]:
    likeliest = np.asarray(predict(tokens[None].astype(np.int32)))[0]
    return [
        bool((likeliest[a.start - 1 : a.stop - 1] == tokens[a.start : a.stop]).all())
        for a in lookups
    ]


def _row(kind: str, length: int, found: list[bool]) -> dict[str, Any]:
    accuracy = float(np.mean(found)) if found else None  # None: too short for even one
    return {"kind": kind, "length": length, "answers": len(found), "accuracy": accuracy}
