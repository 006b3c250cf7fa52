"""Golden outputs: greedy tokens that a change of the code must not change.

    python -m tests.golden record    # write tests/golden.json from this checkout
    python -m tests.golden check     # compare; exit status 1 and a line for each difference
    python -m tests.golden check --model tiny-opt

Each case is a run of the `generate` command: a model, a policy and a dtype, one prompt and a ragged
batch of three, 64 new tokens. The recorded tokens are those of the fused schedule of version 0.1.0
(commit 06b267d); in float32 the layerwise schedule must give them too. Where two logits are nearly
equal, tokens depend on the processor: record on the machine that checks.
"""

import argparse
import contextlib
import io
import json
import sys
import tempfile
from pathlib import Path

from infinigen_jax import generate

FILE = Path(__file__).with_suffix(".json")
CHECKPOINTS = Path(__file__).parents[2] / "shared" / "checkpoints"  # optional
EMBEDDED = ("books-llama", "tiny-llama", "tiny-opt")
POLICIES = ("full", "infinigen", "infinigen-paper", "h2o", "quest", "window")
DTYPES = ("float32", "bfloat16")
SCHEDULES = ("fused", "layerwise")
NEW_TOKENS = 64
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


def models() -> dict[str, str]:
    """Return the names of the cases' models and the arguments of `--model` for them."""
    folders = {folder.name: str(folder) for folder in sorted(CHECKPOINTS.glob("*/"))}
    return {name: name for name in EMBEDDED} | {f"shared/{k}": v for k, v in folders.items()}


def greedy_tokens(
    model: str, policy: str, dtype: str, schedule: str, prompts: list[str]
) -> list[list[int]]:
    """Return new tokens of each prompt, by the command line."""
    with tempfile.TemporaryDirectory() as folder:
        stats = Path(folder) / "stats.json"
        arguments = ["--model", model, "--policy", policy, "--dtype", dtype, "--schedule", schedule]
        arguments += [f"--prompt={prompt}" for prompt in prompts]
        arguments += ["--max-new-tokens", str(NEW_TOKENS), "--ignore-eos", "--quiet"]
        with contextlib.redirect_stdout(io.StringIO()):
            status = generate.main([*arguments, "--stats-json", str(stats)])
        if status:
            raise SystemExit(f"{model} {policy} {dtype}: generate ended with status {status}")
        return json.loads(stats.read_text())["tokens"]


def cases(chosen: argparse.Namespace) -> list[tuple[str, str, str, str, str]]:
    """Return key, model argument, policy, dtype and batch of each chosen case."""
    return [
        (f"{name} {policy} {dtype} {batch}", model, policy, dtype, batch)
        for name, model in models().items()
        if not chosen.model or name in chosen.model
        for policy in POLICIES
        for dtype in DTYPES
        for batch in BATCHES
    ]


def record(chosen: argparse.Namespace) -> int:
    known = json.loads(FILE.read_text()) if FILE.exists() else {}
    for key, model, policy, dtype, batch in cases(chosen):
        rows = greedy_tokens(model, policy, dtype, "fused", BATCHES[batch])
        known[key] = [" ".join(map(str, row)) for row in rows]
        FILE.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n")
        print(key, flush=True)
    return 0


def check(chosen: argparse.Namespace) -> int:
    """Compare both schedules with the record; return 1 if a token differs."""
    known, wrong, compared = json.loads(FILE.read_text()), 0, 0
    for key, model, policy, dtype, batch in cases(chosen):
        if key not in known:
            continue
        # In bfloat16 the two schedules round differently, now as in version 0.1.0.
        for schedule in SCHEDULES if dtype == "float32" else SCHEDULES[:1]:
            rows = greedy_tokens(model, policy, dtype, schedule, BATCHES[batch])
            texts = [" ".join(map(str, row)) for row in rows]
            compared += 1
            if texts != known[key]:
                wrong += 1
                print(f"differs: {key} {schedule}", flush=True)
    print(f"{compared} cases compared, {wrong} differ")
    return 1 if wrong or not compared else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("action", choices=["record", "check"])
    parser.add_argument("--model", nargs="*", help="names of models; all by default")
    chosen = parser.parse_args()
    return record(chosen) if chosen.action == "record" else check(chosen)


if __name__ == "__main__":
    sys.exit(main())
