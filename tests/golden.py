"""Golden outputs: greedy tokens that a change of the code must not change.

    python -m tests.golden record    # write tests/golden.json from this checkout
    python -m tests.golden check     # compare; exit status 1 and a line for each difference
    python -m tests.golden check --model tiny-opt

Each case has a model, a policy and a dtype, and one prompt or a ragged batch of three, which 64
tokens continue. The recorded tokens are those of the fused schedule of version 0.1.0
(commit 06b267d); in float32 the layerwise schedule must give them too. Where two logits are nearly
equal, tokens depend on the processor: record on the machine that checks.
"""

import argparse
import functools
import itertools
import json
import sys
from pathlib import Path

from infinigen_jax import Engine, load
from infinigen_jax.files.user_cache import keep_programs
from infinigen_jax.policies import POLICIES

FILE = Path(__file__).with_suffix(".json")
CHECKPOINTS = Path(__file__).parents[2] / "shared" / "checkpoints"  # optional
# Paths by name; an embedded model's name is its path.
MODELS = {name: name for name in ("books-llama", "tiny-llama", "tiny-opt")}
MODELS |= {f"shared/{folder.name}": str(folder) for folder in sorted(CHECKPOINTS.glob("*/"))}
POLICY_NAMES = ("full", "infinigen", "infinigen-paper", "h2o", "quest", "window")
DTYPES = ("float32", "bfloat16")
SCHEDULES = ("fused", "layerwise")
STORY = (
    "Once upon a time there was a little girl who lived in a house by the sea. Every morning she "
    "walked along the beach and looked for shells. One day she found a small blue box in the sand. "
    "She opened the box, and inside it was a key. The girl did not know which door the key would "
    "open, so she asked her friend, the old fisherman. He looked at the key and smiled. "
)
BATCHES = {
    "single": [STORY + "The fisherman said"],
    "ragged": ["The little girl", STORY, STORY[:200]],
}


loaded = functools.lru_cache(maxsize=2)(load)


def greedy_tokens(name: str, policy: str, dtype: str, batch: str, schedule: str) -> list[str]:
    """Return the new tokens of each prompt, as text."""
    model = loaded(MODELS[name], dtype)
    # The window of version 0.1.0; others have their own.
    settings = {"window": 32} if policy in ("infinigen", "h2o", "quest", "window") else {}
    engine = Engine(model, policy=POLICIES[policy](**settings), schedule=schedule)
    rows = engine.generate(BATCHES[batch], max_new_tokens=64, ignore_eos=True).tokens
    return [" ".join(map(str, row)) for row in rows]


def main() -> int:
    """Record or compare the tokens of each case; return 1 if one differs, or none is compared."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("action", choices=["record", "check"])
    parser.add_argument("--model", nargs="*", help="names of models; all by default")
    chosen = parser.parse_args()
    keep_programs()
    known = json.loads(FILE.read_text()) if FILE.exists() else {}
    names = [name for name in MODELS if not chosen.model or name in chosen.model]
    compared = wrong = 0
    for case in itertools.product(names, POLICY_NAMES, DTYPES, BATCHES):
        key = " ".join(case)
        if chosen.action == "record":
            known[key] = greedy_tokens(*case, SCHEDULES[0])
            FILE.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n")
            print(key, flush=True)
        elif key in known:
            # In bfloat16 the two schedules round differently, now as in version 0.1.0.
            for schedule in SCHEDULES if "float32" in case else SCHEDULES[:1]:
                compared += 1
                if greedy_tokens(*case, schedule) != known[key]:
                    wrong += 1
                    print(f"differs: {key} {schedule}", flush=True)
    if chosen.action == "record":
        return 0
    print(f"{compared} cases compared, {wrong} differ")
    return 1 if wrong or not compared else 0


if __name__ == "__main__":
    sys.exit(main())
