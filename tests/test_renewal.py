"""A result of which some lines are measured again."""

import json
from pathlib import Path

import pytest

from benchmarks import quality
from benchmarks.renewal import only_policies, renewed
from infinigen_jax.errors import InputError


def result(date: str, **values: float):
    """Of the full cache, and of policies with a value each."""
    lines = [{"policy": "full", "reference": True, "nats": values.pop("full", 1.0), "seconds": 7}]
    lines += [{"policy": name, "reference": False, "nats": x} for name, x in values.items()]
    return {
        "text": {"file": "t"},
        "model": {"name": "m", "manifest_sha256": "1"},
        "versions": {"jax": "1"},
        "date": date,
        "configurations": lines,
    }


def test_a_command_with_some_of_its_policies():
    given = ("--budget", "0.1", "--policy", "full", "infinigen:alpha=5", "infinigen-paper", "--x")
    assert only_policies(given, ["infinigen"]) == (
        *("--budget", "0.1", "--policy", "infinigen:alpha=5", "--x"),
    )
    assert only_policies(given, ["quest"]) is None
    assert only_policies(("--budget", "0.1"), ["infinigen"]) is None
    assert only_policies(given[:-1], ["infinigen-paper"]) == (
        *("--budget", "0.1", "--policy", "infinigen-paper"),
    )


def test_lines_of_other_policies_are_kept_with_their_date():
    old, new = result("May", infinigen=2.0, quest=3.0), result("June", infinigen=4.0)
    new["configurations"][0] |= {"seconds": 8, "window_nats": [1.0]}  # which results have of late
    made = renewed(old, new)
    assert made["date"] == "June"
    kept = {"date": "May", "policy": "quest", "reference": False, "nats": 3.0}
    assert made["configurations"] == [*new["configurations"], kept]
    assert renewed(made, new) == made, "a line that was kept twice has the date of its measurement"
    # Another line of the full cache is one of those that nobody measured again.
    rows = {"policy": "full", "reference": False, "nats": 1.5}
    old["configurations"].append(rows)
    assert renewed(old, new)["configurations"][-1] == {"date": "May"} | rows


def test_a_model_that_was_converted_again_is_the_same_if_its_full_cache_is():
    old, new = result("May", infinigen=2.0, quest=3.0), result("June", infinigen=4.0)
    new["model"] = {"name": "m", "manifest_sha256": "2"}
    made = renewed(old, new)
    kept = {"date": "May", "manifest_sha256": "1", "policy": "quest"}
    assert made["model"] == new["model"] and made["configurations"][-1].items() >= kept.items()
    # The next conversion does not change what a line says of its own.
    later = new | {"model": {"name": "m", "manifest_sha256": "3"}, "date": "July"}
    assert renewed(made, later)["configurations"][-1] == made["configurations"][-1]


@pytest.mark.parametrize(
    "change",
    [
        {"text": {"file": "u"}},
        {"versions": {"jax": "2"}},
        {"model": {"name": "n", "manifest_sha256": "1"}},
        result("June", full=1.5),
    ],
)
def test_lines_that_cannot_stand_together_are_refused(change):
    with pytest.raises(InputError, match="remove"):
        renewed(result("May", quest=3.0), result("June") | change)


def test_the_command_measures_what_is_named_alone(tmp_path, monkeypatch):
    path = tmp_path / "perplexity-tiny-opt.json"
    path.write_text(json.dumps(result("May", infinigen=2.0, quest=3.0)))
    ran = []

    def fake(command, **_):
        ran.append(command)
        made = Path(command[command.index("--json") + 1])
        made.write_text(json.dumps(result("June", infinigen=4.0)))
        return type("Done", (), {"returncode": 0})

    monkeypatch.setattr(quality.subprocess, "run", fake)
    given = ["--text", "t", "--only", "perplexity", "--models", "tiny-opt", "--out", str(tmp_path)]
    assert quality.main([*given, "--renew", "infinigen"]) == 0
    found = json.loads(path.read_text())["configurations"]
    assert {line["policy"]: line["nats"] for line in found} == {
        "full": 1.0,
        "infinigen": 4.0,
        "quest": 3.0,
    }
    assert "infinigen" in ran[0] and "quest" not in ran[0]
    assert quality.main([*given, "--renew", "window-less"]) == 0
    assert len(ran) == 1
