"""Conversations: turns on a kept cache, saved, resumed, and refused."""

import contextlib
import dataclasses
import gc
import os
import signal
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest
from runtime import (
    ALL,
    SPARSE,
    TAILED,
    engine,
    numbers,
    random_model,
    slow_except,
    tokens_of,
    with_ends,
)
from tiny import interruptible, only, refuses

from infinigen_jax import Conversation, Engine, Full, InputError, Pool, Run, Sampling, embedded
from infinigen_jax.engine import conversation as conversation_module
from infinigen_jax.engine import memory_plan as planning
from infinigen_jax.engine import saved_file
from infinigen_jax.engine.rounds import Rounds
from infinigen_jax.models.small_weights import shrink
from infinigen_jax.policies import H2O, InfiniGen, InfiniGenPaper, Policy, PreviousQuery, Quest
from infinigen_jax.programs.compilations import compilations

pytestmark = pytest.mark.usefixtures("longest_drafts")

CONTEXT = 200
TURNS = [numbers(n) for n in (37, 1, 12, 23)]
LENGTHS = (9, 1, 14, 6)  # of the answers; a flush is due every 4 tokens, or every one
LOSSLESS: dict[str, Any] = {"lossless": True, "draft_tokens": 2}
SETTINGS: dict[str, tuple[Policy, dict[str, Any]]] = {
    "infinigen": (InfiniGen(budget=0.2, window=4, sinks=2, alpha=4.0), {}),
    "hot-int8": (SPARSE, {"rows": "int8", "hot_set": 1.5}),
    "paper-layerwise": (InfiniGenPaper(alpha=1.0, streamed_layers=0), {"schedule": "layerwise"}),
    "full-int4": (Full(window=4), {"rows": "int4"}),
    "h2o": (H2O(budget=0.2, window=4, sinks=2), {}),
    "quest": (Quest(budget=0.3, window=4, sinks=2), {}),
    "previous-query": (PreviousQuery(budget=0.2, window=4, sinks=2), {}),
}


def say(conversation: Conversation, turn: list[int], new: int, stop: int = 1000) -> list[int]:
    """Return the answer, interrupted after `stop` tokens."""
    answer = []
    with contextlib.closing(conversation.turn(turn, new, ignore_eos=True)) as steps:
        for step in steps:
            answer += step.tokens
            if len(answer) == stop:
                break
    return answer


def test_a_reset_gives_the_cache_back():
    """The next turn has room for its own."""
    conversation = engine("one", SPARSE).conversation(context=CONTEXT)
    say(conversation, TURNS[0], 2)
    index = weakref.ref(jax.tree.leaves(conversation.run.cache.states)[0])
    for _ in range(2):
        conversation.reset()
    gc.collect()
    assert index() is None and conversation.run.stats().new_tokens == 2


def test_a_lossless_conversation_times_its_verifications_once(monkeypatch):
    calls, warm_up = [], Rounds.warm_up
    monkeypatch.setattr(Rounds, "warm_up", lambda *given: calls.append(warm_up(*given)))
    conversation = engine("one", SPARSE, **LOSSLESS).conversation(context=CONTEXT)
    for turn in TURNS[:2]:
        say(conversation, turn, 4)
    assert len(calls) == 1


def engine_of(policy: Policy, **settings: Any) -> Callable[[], Engine]:
    return lambda: engine("one", policy, **settings)


@pytest.mark.parametrize(
    ("name", "policy", "schedule"),
    [
        ("one", Full(window=5), "fused"),
        pytest.param("opt", ALL, "layerwise", marks=pytest.mark.slow),
        pytest.param("windows", Full(window=5), "fused", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("stops", [LENGTHS, (5, 1, 7, 3)], ids=["whole", "broken off"])
def test_a_turn_gives_what_a_prefill_of_all_that_was_said_gives(name, policy, schedule, stops):
    made = engine(name, policy, schedule=schedule)
    conversation = made.conversation(context=CONTEXT)
    said: list[int] = []
    for turn, new, stop in zip(TURNS, LENGTHS, stops, strict=True):
        said += turn
        expected = tokens_of(made, [said], new, ignore_eos=True)[0][:stop]
        assert say(conversation, turn, new, stop) == expected
        said += expected
        assert conversation.tokens == said
        read = conversation.run.stats().prompt_tokens_read  # also the last answer's last token
        assert len(turn) <= read <= len(turn) + 1


@pytest.mark.parametrize("name", slow_except(SETTINGS, "hot-int8"))
def test_a_saved_conversation_goes_on_as_it_would_have(name, tmp_path):
    policy, settings = SETTINGS[name]
    made = engine("one", policy, **settings)
    here = made.conversation(Sampling(temperature=1.0, seed=3), CONTEXT)
    say(here, TURNS[0], LENGTHS[0])
    say(here, TURNS[1], LENGTHS[1])
    here.messages.append({"role": "user", "content": "ü"})
    here.save(tmp_path / "saved")
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    other = Engine(random_model("one"), policy=policy, dense_layers=0, **settings)
    there = other.resume(tmp_path / "saved")
    assert (there.tokens, there.messages, there.cached) == (here.tokens, here.messages, here.cached)
    for turn, new in zip(TURNS[2:], LENGTHS[2:], strict=True):
        assert say(there, turn, new) == say(here, turn, new)
    there.save(tmp_path / "again")
    here.save(tmp_path / "saved")
    assert (tmp_path / "again").read_bytes() == (tmp_path / "saved").read_bytes()


def test_sampling_goes_on_from_turn_to_turn():
    made, sampling = engine("one", Full(window=5), 0), Sampling(temperature=1.0, seed=2)
    conversation = made.conversation(sampling, CONTEXT)
    first = say(conversation, TURNS[2], 8)
    assert first == tokens_of(made, [TURNS[2]], 8, sampling=sampling, ignore_eos=True)[0]
    # The same question again, with other random numbers.
    other = made.conversation(sampling, CONTEXT)
    say(other, TURNS[3], 3)
    assert say(conversation, TURNS[3], 8) != say(other, TURNS[3], 8)


def test_a_turn_interrupted_within_its_prompt_draws_nothing(monkeypatch):
    made, sampling = engine("one", Full(window=5), 0), Sampling(temperature=1.0, seed=2)
    talks = [made.conversation(sampling, CONTEXT) for _ in range(2)]
    for talk in talks:
        say(talk, TURNS[2], 5)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Run, "start", lambda run: signal.default_int_handler(signal.SIGINT, None))
        say(talks[0], TURNS[1], 5)
    for talk in talks:
        talk.reset()
    assert say(talks[0], TURNS[3], 8) == say(talks[1], TURNS[3], 8)


def test_a_token_that_ends_a_text_ends_a_turn():
    free = engine("one", Full(window=5), 0)
    answer = tokens_of(free, [TURNS[0]], 8, ignore_eos=True)[0]
    made = with_ends(free, answer[4])
    conversation = made.conversation(context=CONTEXT)
    spoken = [step.tokens[0] for step in conversation.turn(TURNS[0], 20)]
    assert spoken == answer[: answer.index(answer[4]) + 1]
    said = [*conversation.tokens, *TURNS[1]]
    assert say(conversation, TURNS[1], 6) == tokens_of(made, [said], 6, ignore_eos=True)[0]


@pytest.mark.parametrize("context", [60, 128])
def test_a_context_that_is_full(context, tmp_path):
    """The larger one is the whole capacity: chunks and flushes are at the end of the cache."""
    made = engine("one", Full(window=5), 0)
    conversation = made.conversation(context=context)
    assert conversation.capacity == 128
    say(conversation, TURNS[0], 5)
    said = [*conversation.tokens, *TURNS[2]]
    expected = tokens_of(made, [said], context - len(said), ignore_eos=True)[0]
    assert say(conversation, TURNS[2], 128) == expected
    conversation.save(tmp_path / "full")
    for one in conversation, made.resume(tmp_path / "full"):
        refuses(f"context {context}: the conversation has {context}", say, one, [5], 1)
        assert len(one.tokens) == context


def test_no_program_is_compiled_for_a_later_turn():
    made = engine("one")
    conversation = made.conversation(context=CONTEXT)
    say(conversation, TURNS[0], 9)
    say(conversation, TURNS[0], 9)
    before, address = compilations(), conversation.run.cache.host.unsafe_buffer_pointer()
    say(conversation, TURNS[2], 7)
    host = conversation.run.cache.host
    assert compilations() == before and host.unsafe_buffer_pointer() == address
    assert host.sharding.memory_kind == "pinned_host"


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "talk"
    conversation = engine("one").conversation(context=CONTEXT)
    say(conversation, TURNS[0], 5)
    conversation.save(path)
    return path


OTHERS = {
    "budget 0.2, not 0.3": engine_of(dataclasses.replace(SPARSE, budget=0.3)),
    "policy infinigen, not full": engine_of(Full()),
    "window 4, not 5": engine_of(dataclasses.replace(SPARSE, window=5)),
    "rows auto, not int8": engine_of(SPARSE, rows="int8"),
    "dense layers 0, not 1": engine_of(SPARSE, dense_layers=1),
    "lossless False, not True": engine_of(SPARSE, lossless=True),
    "another model": lambda: engine("gqa"),
    "pool: a conversation": engine_of(TAILED, pool=Pool(tokens=50)),
}


def test_another_format_is_refused_by_its_version(saved, monkeypatch):
    monkeypatch.setattr(saved_file, "VERSION", 3)
    refuses("format version 2, but version 3 is needed", engine("one").resume, saved)


@pytest.mark.parametrize("why", OTHERS)
def test_other_settings_are_refused_by_name(why, saved):
    refuses(why, OTHERS[why]().resume, saved)


def test_other_weights_of_the_same_files_are_refused_by_name(tmp_path):
    model = dataclasses.replace(random_model("one"), fingerprint="of its files")
    conversation = Engine(model, policy=SPARSE, dense_layers=0).conversation(context=CONTEXT)
    say(conversation, TURNS[0], 2)
    conversation.save(tmp_path / "talk")
    layers = [shrink(layer, "int8") for layer in model.params["layers"]]
    small = dataclasses.replace(model, params=model.params | {"layers": layers})
    with pytest.raises(InputError, match="weight dtype float32, not int8"):
        Engine(small, policy=SPARSE, dense_layers=0).resume(tmp_path / "talk")


def test_settings_that_change_no_result_may_differ(saved, tmp_path):
    """The conversation stays the same, to its bytes."""
    engine("one", schedule="layerwise", hot_set=2.0).resume(saved).save(tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == saved.read_bytes()


def test_memory_is_checked_before_anything_is_allocated(saved, monkeypatch):
    """Both a resumed conversation and a first turn, which can be repeated."""

    def allocate(*arguments: Any) -> None:
        raise AssertionError("allocated")

    made = engine("one")
    conversation = made.conversation(context=CONTEXT)
    with monkeypatch.context() as patch:
        patch.setattr(conversation_module, "restore", allocate)
        patch.setattr(planning, "available_host_bytes", lambda: 1 << 16)
        for refused in (lambda: made.resume(saved), lambda: say(conversation, TURNS[1], 2)):
            refuses("64.0 KiB are available: lower `context`", refused)
    assert conversation.tokens == [] and conversation.run is None
    assert len(say(conversation, TURNS[1], 2)) == 2


def test_a_resumed_conversation_has_memory_for_its_drafts(tmp_path, monkeypatch):
    made, plans = engine("one", **LOSSLESS), []
    conversation = made.conversation(context=CONTEXT)
    say(conversation, TURNS[0], 1)
    conversation.save(tmp_path / "talk")
    monkeypatch.setattr(conversation_module, "check_memory", lambda plan, *_: plans.append(plan))
    made.resume(tmp_path / "talk")
    assert plans[-1] == conversation.run.phases[-1]


def test_what_cannot_be_begun_saved_or_resumed(tmp_path, saved):
    made = engine("one")
    for context in (1, 257):
        refuses(f"context {context}: give 2 to 256", made.conversation, context=context)
    conversation = made.conversation(context=CONTEXT)
    refuses("no conversation yet", conversation.save, tmp_path / "none")
    refuses("max_new_tokens 0", say, conversation, TURNS[0], 0)
    steps = conversation.turn(TURNS[0], 5)
    next(steps)
    refuses("in the middle of a turn", say, conversation, TURNS[0], 5)
    steps.close()
    refuses("No such file|nothing was written", conversation.save, tmp_path / "missing" / "talk")
    os.mkfifo(tmp_path / "pipe")
    refuses("pipe: it is not a file", conversation.save, tmp_path / "pipe")
    refuses("no such file", made.resume, tmp_path / "none")
    (tmp_path / "other").write_bytes((embedded() / "model.safetensors").read_bytes())
    refuses("not a saved conversation", made.resume, tmp_path / "other")
    assert only(tmp_path) == ["other", "pipe"]


def test_a_conversation_is_reset_within_a_turn(tmp_path):
    """The turn's iterator, closed later, changes nothing, and the file would lack its tokens."""
    made = engine("one", Full(window=4))
    fresh = say(made.conversation(context=CONTEXT), TURNS[0], 5)
    conversation = made.conversation(context=CONTEXT)
    old = conversation.turn(TURNS[2], 5, ignore_eos=True)
    next(old)
    refuses("in the middle of a turn", conversation.save, tmp_path / "chat")
    lengths = weakref.ref(conversation.run.cache.lengths)
    conversation.reset()
    gc.collect()
    assert lengths() is None, "the next turn has no room for its cache"
    new = conversation.turn(TURNS[0], 5, ignore_eos=True)
    answer = list(next(new).tokens)
    refuses("was reset during this turn", next, old)
    for step in new:
        answer += step.tokens
    assert answer == fresh and conversation.tokens == TURNS[0] + fresh
    assert not (tmp_path / "chat").exists()


@pytest.mark.parametrize("settings", [{}, LOSSLESS])
def test_ctrl_c_within_a_step_keeps_the_conversation(settings, monkeypatch):
    """The answer is as if the iterator had been closed after the step's token."""
    made = engine("one", SPARSE, **settings)
    closed, interrupted = (made.conversation(context=CONTEXT) for _ in range(2))
    answer = say(closed, TURNS[0], 9, stop=3)
    taken, take = [], Run._take

    def interrupting(run: Run, *arguments: Any) -> Any:
        taken.append(take(run, *arguments))
        if len(taken) == 3:
            signal.raise_signal(signal.SIGINT)
        return taken[-1]

    monkeypatch.setattr(Run, "_take", interrupting)
    with interruptible(), pytest.raises(KeyboardInterrupt):
        list(interrupted.turn(TURNS[0], 9, ignore_eos=True))
    assert interrupted.tokens == closed.tokens == TURNS[0] + answer
    assert say(interrupted, TURNS[1], 6) == say(closed, TURNS[1], 6)
