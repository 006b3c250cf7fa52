"""Chat: the tokens that the model reads for the messages, and the command line."""

import argparse
import contextlib
import copy
import io
import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from tiny import environment, refuses, started

from infinigen_jax import Engine, Full, InputError, Run, embedded, generate, load
from infinigen_jax.cli import chat
from infinigen_jax.cli.chat import COMMANDS, Talk
from infinigen_jax.cli.dialogue import Dialogue
from infinigen_jax.messages import Messages

pytestmark = pytest.mark.usefixtures("shallow")

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content | trim }}</s>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(load(embedded()), policy=Full())


@pytest.fixture
def template(tmp_path) -> str:
    path = tmp_path / "template.jinja"
    path.write_text(TEMPLATE)
    return str(path)


@pytest.fixture
def talk(command, monkeypatch) -> Callable[..., tuple[Any, str, str]]:
    """Return `talk(lines, *arguments)`, which runs the command with these lines on stdin."""

    def call(lines: str, *arguments: Any, by_hand: bool = False) -> tuple[Any, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
        monkeypatch.setattr(sys.stdin, "isatty", lambda: by_hand)
        few = ("--max-new-tokens", 6, "--policy", "full")
        return command(generate.main, "--chat", *few, *arguments)

    return call


def answered(dialogue: Dialogue, text: str, most: int = 6, **options: Any) -> str:
    return "".join(dialogue.answer(text, most, **options))


def test_the_model_gets_the_template_of_all_messages(engine, template):
    """Also after answers that end by themselves, and that the template alters or puts apart."""
    tokenizer = engine.model.tokenizer
    for ends, apart in ((False, ""), (True, ""), (True, " ")):
        Path(template).write_text(TEMPLATE.replace("</s>", f"{apart}</s>"))
        conversation = engine.conversation(context=128)
        dialogue = Dialogue(conversation, template, "Be brief.")
        for text in ("The king said", "And then?", "Who?"):
            answer = answered(dialogue, text, 7, ignore_eos=True)
            assert conversation.messages[-1] == {"role": "assistant", "content": answer}
            if ends:  # as if the model had said so
                conversation.tokens.append(tokenizer.eos_token_id)
        roles = [message["role"] for message in conversation.messages]
        assert roles == ["system"] + ["user", "assistant"] * 3
        said = rest = tokenizer.decode(conversation.tokens)
        for message in conversation.messages:
            before, mark, rest = rest.partition(f"[{message['role']}]")
            assert mark, (message, before)
            assert rest.partition("</s>")[0].strip() == message["content"].strip()
        assert said.count("</s>") == 6 + ends and said.count("<s>") == 1


def test_plain_text_goes_on(engine):
    conversation = engine.conversation(context=128)
    dialogue = Dialogue(conversation, "plain")
    first, second = (answered(dialogue, text) for text in ("The king said", "and the queen"))
    text = engine.model.tokenizer.decode(conversation.tokens, skip_special_tokens=True)
    assert text == f"The king said{first}\nand the queen{second}"
    assert first == engine.generate(["The king said"], max_new_tokens=6).texts[0]
    conversation.tokens.append(engine.model.tokenizer.eos_token_id)  # as if the text had ended
    third = answered(dialogue, "and all")
    expected = f"The king said{first}\nand the queen{second}\nand all"
    assert third == engine.generate([expected], max_new_tokens=6).texts[0]
    assert engine.model.tokenizer.decode(conversation.tokens) == f"<s>{expected}{third}"


def test_a_token_that_takes_the_space_after_it(engine, template):
    """Phi 3's token at the end of a turn does. Later turns have the tokens of the whole chat."""
    model = copy.copy(engine.model)
    data = json.loads((embedded() / "tokenizer.json").read_text())
    for token in data["added_tokens"]:
        token["rstrip"] = token["content"] == "</s>"
    tokenizer = copy.copy(engine.model.tokenizer)
    tokenizer.backend = type(tokenizer.backend).from_str(json.dumps(data))
    vars(model)["tokenizer"] = tokenizer
    Path(template).write_text(TEMPLATE.replace("</s>", "</s>{{ '\n\n' }}"))
    conversation = Engine(model, policy=Full()).conversation(context=128)
    dialogue = Dialogue(conversation, template)
    answered(dialogue, "The king said")
    conversation.tokens.append(tokenizer.eos_token_id)
    said = conversation.tokens[:]
    answered(dialogue, "And then?")
    new = tokenizer.encode("</s>\n\n[user] And then?</s>\n\n[assistant]", False)
    assert new == tokenizer.encode("</s>[user] And then?</s>[assistant]", False)
    assert conversation.tokens[: len(said) + len(new) - 1] == said + new[1:]


def test_after_a_turn_that_failed_the_chat_goes_on(engine, template, monkeypatch):
    """The messages before it are read again, and the failed one is forgotten."""
    chats = [Dialogue(engine.conversation(context=128), template) for _ in range(2)]
    for dialogue in chats:
        answered(dialogue, "The king said")
    with monkeypatch.context() as patch:
        patch.setattr(Run, "start", mock.Mock(side_effect=InputError("not finite")))
        refuses("not finite", answered, chats[0], "Who?")
    again, expected = (answered(dialogue, "And then?") for dialogue in chats)
    assert again == expected
    # A second answer within another is refused, which changes nothing.
    pieces = chats[0].answer("Who?", 6)
    first = next(pieces)
    refuses("in the middle of a turn", answered, chats[0], "What?")
    assert first + "".join(pieces) == answered(chats[1], "Who?")


def test_a_conversation_at_the_command_line(talk, template, tmp_path):
    plain = ("--chat-template", template, "--context", 128)
    status, out, err = talk("The king said\n\nAnd then?\nWho?", *plain)
    answers = out.splitlines()
    assert status == 0 and out.endswith("\n") and err.count(" read in ") == 3
    assert "of 128 tokens" in err and "fetched" in err and "tokens/s" in err
    status, out, err = talk("", *plain, "--prompt", "The king said", "--prompt", "And then?")
    assert status == 0 and out == "\n".join(answers[: len(out.splitlines())]) + "\n"

    saved = tmp_path / "saved"
    shared = ("--chat-template", template, "--quiet")
    first = talk("The king said\n", *shared, "--context", 128, "--save", saved)
    second = talk("And then?\nWho?\n", *shared, "--resume", saved, "--save", saved)
    assert first[0] == second[0] == 0 and first[2] == second[2] == ""
    assert (first[1] + second[1]).splitlines() == answers
    talk("/undo\n", *shared, "--resume", saved, "--save", f"{saved}-undone")
    undone = talk("", "--chat-template", template, "--resume", f"{saved}-undone")
    assert undone[2].startswith("resumed: 4 messages, 0 tokens in the cache\n")
    status, out, err = talk("Who?\n", "--chat-template", "plain", "--quiet", "--resume", saved)
    assert (status, out) == (2, "") and "--chat-template plain: the conversation began" in err
    # The default of a new conversation, given by name, also counts as another setting.
    drawn = ("--context", 128, "--temperature", "0.5", "--save", f"{saved}-drawn")
    assert talk("Who?\n", *shared, *drawn)[0] == 0
    for file, temperature in ((saved, "0.5"), (f"{saved}-drawn", "0")):
        status, out, err = talk("", *shared, "--resume", file, "--temperature", temperature)
        assert (status, out) == (2, "") and "leave --temperature" in err


@pytest.mark.parametrize(
    ("end", "status"),
    [
        (mock.Mock(side_effect=BrokenPipeError), 141),  # nobody reads the answers
        (mock.Mock(side_effect=RuntimeError("RESOURCE_EXHAUSTED")), 2),
        (lambda: os.kill(os.getpid(), signal.SIGTERM), 143),
        (lambda: os.kill(os.getpid(), signal.SIGHUP), 129),  # the terminal is closed
    ],
)
def test_a_chat_is_saved_however_it_ends(end, status, talk, tmp_path, monkeypatch):
    saved, answer, save = tmp_path / "saved", Talk.answer, Dialogue.save

    def ending(self: Talk, text: str) -> None:
        answer(self, text)
        end()

    def again(self: Dialogue, path: Path) -> str:
        os.kill(os.getpid(), signal.SIGTERM)  # from somebody impatient
        return save(self, path)

    monkeypatch.setattr(Talk, "answer", ending)
    monkeypatch.setattr(Dialogue, "save", again)
    given = ("--chat-template", "plain", "--context", 64, "--save", saved)
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored below `nohup`
    try:
        assert talk("The king said\n", *given)[0] == status
    finally:
        signal.signal(signal.SIGHUP, before)
    assert saved.is_file()


def test_a_full_context(talk, tmp_path):
    saved = tmp_path / "saved"
    given = ("--chat-template", "plain", "--context", 16, "--save", saved)
    status, out, err = talk("The king said\n" * 3 + "word " * 20, *given)
    assert status == 2 and "Traceback" not in err
    assert err.count("the context is full: the oldest 2 messages are dropped") == 2
    assert err.splitlines()[-1].startswith("error: --context 16: the conversation has 1")
    assert f"messages saved to {saved}" in err and saved.is_file() and out.count("\n") == 3
    # A person can go on.
    status, out, err = talk("word " * 20 + "\n/undo\n", *given, by_hand=True)
    assert status == 0 and "error: --context 16: the conversation has 0" in err
    assert "[no message to undo]" in err


def test_a_full_context_drops_the_oldest_turns(engine, template):
    messages, conversation = [], engine.conversation(context=128)
    dialogue = Dialogue(conversation, template, "Be brief.", messages.append)
    for number in range(6):
        assert answered(dialogue, f"The king said {number}", 8, ignore_eos=True)
    kept = [m["content"] for m in conversation.messages]
    assert messages and all("the oldest" in message for message in messages)
    assert kept[0] == "Be brief." and kept[-2] == "The king said 5"
    assert "The king said 0" not in kept and len(conversation.tokens) <= 128
    refuses("leave no room", answered, dialogue, "word " * 200)
    assert [m["content"] for m in conversation.messages] == kept
    assert answered(dialogue, "And then?")


def test_forgotten_messages(engine, template, tmp_path):
    """The model then reads the tokens of a new conversation, and a file has the rest."""

    def said(chosen):
        return engine.model.tokenizer.decode(chosen.tokens)

    saved, conversation = tmp_path / "saved", engine.conversation(context=128)
    dialogue = Dialogue(conversation, template, "Be brief.")
    first, second = (answered(dialogue, text) for text in ("The king said", "And then?"))
    assert dialogue.undo() and dialogue.save(saved) == f"3 messages saved to {saved}"
    resumed = engine.resume(saved)
    contents = [m["content"] for m in resumed.messages]
    assert contents == ["Be brief.", "The king said", first]
    assert answered(Dialogue(resumed, template), "And then?") == second
    assert answered(dialogue, "And then?") == second
    assert said(conversation).count("[user]") == 2 and first in said(conversation)
    dialogue.clear()
    assert conversation.messages == [{"role": "system", "content": "Be brief."}]
    other = engine.conversation(context=128)
    for talking in (dialogue, Dialogue(other, template, "Be brief.")):
        assert answered(talking, "The king said") == first
    assert said(conversation) == said(other)
    assert dialogue.undo() and not dialogue.undo()


def echo(text: str, *arguments: Any, **options: Any) -> Iterator[str]:
    yield f"<{text}>"


def test_commands(monkeypatch, capsys, tmp_path):
    inputs = ["one", "/undo", "/clear", f"/save {tmp_path}/x", "/save", "/stats", "/what is it"]
    inputs += ["/help", " ", "/etc/passwd: what is it?", "two\nlines", "/quit", "later"]
    passed = "/etc/passwd: what is it?"
    following, dialogue = iter(inputs), mock.create_autospec(Dialogue, instance=True)
    dialogue.answer.side_effect = echo
    dialogue.save.return_value, dialogue.summary.return_value = "saved", "summary"
    monkeypatch.setattr(chat, "line_reader", lambda: lambda: next(following))
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    arguments = argparse.Namespace(max_new_tokens=None, ignore_eos=False, stop=None)
    Talk(dialogue, arguments, Messages(quiet=True), {}).read()
    calls = [(name, *given[:1]) for name, given, _ in dialogue.method_calls]
    assert [call for call in calls if call[0] != "summary"] == [
        *(("answer", "one"), ("undo",), ("clear",), ("save", tmp_path / "x")),
        *(("answer", passed), ("answer", "two\nlines")),
    ]
    out, err = capsys.readouterr()
    assert out == f"<one>\n<{passed}>\n<two\nlines>\n"
    for expected in ("summary", "saved", "/save: give the name", "/what: no such command"):
        assert expected in err
    assert all(f"/{name}" in err for name in COMMANDS)


@contextlib.contextmanager
def reader(**variables: Any) -> Iterator[tuple[int, Any]]:
    """Yield a terminal, and the output of a process that prints the inputs read from it."""
    code = "from infinigen_jax.cli import chat as x; print([*iter(x.line_reader(), None)])"
    (parent, child), given = pty.openpty(), environment(**variables)
    with started("-c", code, env=given, stdin=child, stderr=child) as process:
        os.close(child)
        yield parent, process.stdout
        os.close(parent)


def test_the_line_editor_at_a_terminal():
    """Editing, a pasted text of several lines as one input, and the end by Ctrl-C twice."""
    pytest.importorskip("prompt_toolkit")
    edited, pasted = b"hallo\x1b[D\x1b[D\x1b[D\x7fe\r", b"\x1b[200~two\nlines\x1b[201~\r"
    with reader(TERM="xterm", PROMPT_TOOLKIT_NO_CPR="1") as (terminal, output):
        for keys in (edited, pasted, b"\x03", b"\x03"):
            shown = b""
            while b"\x1b[?2004h" not in shown:  # ready for pasted text
                shown += os.read(terminal, 4096)
            os.write(terminal, keys)
        assert output.read() == b"['hello', 'two\\nlines']\n"


def test_a_terminal_without_control_sequences_gets_none():
    with reader(TERM="dumb") as (terminal, output):
        os.write(terminal, b"hello\n\x04")
        assert output.read() == b"['hello']\n"
        assert b"\x1b" not in os.read(terminal, 4096)


def test_a_line_that_is_not_utf8_comes_too_late_to_lose_anything(talk, tmp_path):
    """In the C locale, bytes that are not UTF-8 become lone surrogates."""
    saved = tmp_path / "saved"
    lines = "The king said\n\udcff\n"
    status, out, err = talk(lines, "--chat-template", "plain", "--context", 64, "--save", saved)
    assert status == 2 and out and saved.is_file()
    assert err.splitlines()[-1] == "error: stdin: not UTF-8 text; convert it first"


@pytest.mark.slow
def test_ctrl_c_ends_an_answer_and_not_the_conversation():
    """A long answer is interrupted; the next line is answered after that part."""
    arguments = ("--chat", "--chat-template", "plain", "--context", "1000")
    arguments += ("--model", str(embedded()), "--schedule", "layerwise")
    arguments += ("--max-new-tokens", "900")
    with started("-m", "infinigen_jax.generate", *arguments) as process:
        summaries, rest = break_off_twice(process)
    assert (process.returncode, *rest) == (0, b"", b"")
    answered = [int(line.split(" answered")[0].split()[-1]) for line in summaries]
    said = [int(line.split(" of 1000")[0].removeprefix("[")) for line in summaries]
    assert max(answered) < 400 and said[1] > said[0] + answered[1]


def break_off_twice(process: subprocess.Popen[bytes]) -> tuple[list[str], tuple[bytes, bytes]]:
    """Return the message after each turn, and the output after both."""
    summaries = []
    for _ in range(2):
        process.stdin.write(b"The king said\n")
        process.stdin.flush()
        assert os.read(process.stdout.fileno(), 1)
        process.send_signal(signal.SIGINT)
        lines = (line.decode() for line in process.stderr)
        summaries.append(next(line for line in lines if line.startswith("[")))
        assert os.read(process.stdout.fileno(), 1 << 16).endswith(b"\n")
    return summaries, process.communicate(timeout=120)
