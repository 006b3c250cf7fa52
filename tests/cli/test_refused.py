"""Bad options end every command with one line that names them, and status 2."""

import contextlib
import io
import re
import shlex
import socket
import sys

import pytest

from infinigen_jax import evaluate, generate, plan, serve
from infinigen_jax.convert import __main__ as convert
from infinigen_jax.server.scheduler import Scheduler

pytestmark = pytest.mark.usefixtures("shallow")

GENERATE = {
    "--no-such-option": "--no-such-option",
    "--max-tokens 30": r"--max-tokens 30 \(did you mean --max-new-tokens\?\); see",
    "--max-new-tokens": "--max-new-tokens expected one argument",
    "'stray\nargument'": "unrecognized arguments: stray argument",
    "--max-new-tokens 0": "--max-new-tokens",
    "--policy best": "--policy best",
    "--policy infinigen:speculate_from=output": "speculate_from=output: speculate_from output: use",
    "--schedule eager": "--schedule eager",
    "--weight-dtype int3": "--weight-dtype int3: use bfloat16, int8 or int4",
    "--prefill-chunk 63": "--prefill-chunk",
    "--stop ''": "--stop '': give a text",
    "--logprobs 2": "--logprobs: they are written to --stats-json",
    "--prefix ''": "--prefix: it is empty",
    "--prefix a --prefix-file b": "--prefix: not with --prefix-file",
    "--prompt ''": "--prompt",
    "--prompt \udcff": "--prompt: not UTF-8 text",
    "--prompt-file /missing": "--prompt-file /missing: No such file",
    "--prompt-file /": "--prompt-file",
    "--chat-template /missing --prefix \udcff": "--prefix: not UTF-8 text",
    "--prefix-file /missing": "--prefix-file /missing: No such file",
    "--stats-json /missing/x": "--stats-json /missing/x: cannot be written",
    "--stats-json /": "--stats-json",
    "--stats-json ''": "--stats-json",
    "--model /missing": "/missing: no such folder",
    "--model tiny-lama": "tiny-lama: no such folder; .* org/name .* tiny-llama or tiny-opt",
    "--pool-tokens many": "--pool-tokens many: give a number",
    "--pool-tokens 120%": "--pool-tokens 120%: it must be",
    "--pool-tokens 10 --policy infinigen:window=32": "--pool-tokens 10: .* use at least 32",
    "--pool-eviction lru": "--pool-eviction: .* --pool-tokens",
    "--pool-tokens 50 --policy quest": "cannot have a limit; use full, infinigen, .* or window",
    "--system x": "--system: no chat template",
    "--raw --system x": "--raw: not with --system",
    "--save x": "--save: only with --chat",
    "--context 9": "--context: only with --chat",
    "--chat": "--chat-template plain",
    "--chat --prefix a": "--prefix: not with --chat",
    "--chat --batch 2": "--batch: not with --chat",
    "--chat --stats-json x": "--stats-json: not with --chat",
    "--chat --raw": "--raw: not with --chat",
    "--chat --chat-template plain --logprobs 0": "--logprobs: not with --chat",
    "--chat --resume x --context 9": "--context: a resumed conversation",
    "--chat --save /missing/x": "--save /missing/x: cannot be written",
    "--chat --system \udcff": "--system: not UTF-8 text",
    "--chat --chat-template plain --prompt \udcff": "--prompt: not UTF-8 text",
    "--chat --chat-template /missing": "--chat-template /missing: No such file",
    "--chat --resume /missing": "/missing: no such file",
    "--chat --context 99999": "--context 99999: give 2 to 1024",
    "--chat --pool-tokens 50": "--pool-tokens: a conversation keeps every row",
}
PLAN = {
    "--context 0": "--context 0",
    "--context 9999": "--context 9999: the model has 1024 positions",
    "--context 64 --rows int3": "--rows int3",
    "--context 64 --model /nowhere": "/nowhere: no such folder",
    "--context 64 --json /nowhere/x": "--json",
    "--context 64 --dtype int8": "--dtype int8",
}
EVALUATE = {
    "": "COMMAND",
    "recal": "recal",
    "perplexity": "--text",
    "perplexity --text t --no-such": "--no-such",
    "retrieval --length 8": "--length",
    "retrieval --length 100000": "--length",
    "retrieval --length 60": "--length",
    "retrieval --depth 1.5": "--depth",
    "retrieval --items 0": "--items",
    "retrieval --haystack /absent": "--haystack",
    "retrieval --haystack F --pairs": "--pairs",
}
CONVERT = {"": "required", "a b --skew odd": "--skew", "/missing out": "/missing: no such folder"}
CONVERT["a b --skew none --calibration F"] = "--calibration: without --skew nothing is calibrated"
CONVERT["tiny-llama out"] = "tiny-llama: an embedded model is converted already"
SERVE = {
    f"--quiet --port 0 {line}": wanted
    for line, wanted in {
        "--context 1": "--context",
        "--context 4096": "--context 4096",
        "--port 99999": "--port",
        "--host 203.0.113.1": "--host 203.0.113.1",
        "--host ''": "--host: it is empty",
        "--host 'a\udcff'": "--host a",
        "--model ''": "--model: it is empty",
        "--pool-tokens 100": "--pool-tokens",
        "--batch 1000000 --context 1k": "--batch",
        "--policy full --lossless": "--lossless",
        "--api-key ''": "--api-key",
        "--allow-origin 'http://[::1'": "--allow-origin http",
        "--allow-origin http://example.org/": "--allow-origin http",
    }.items()
}
COMMANDS = {
    generate.main: GENERATE,
    plan.main: PLAN,
    evaluate.main: EVALUATE,
    convert.main: CONVERT,
    serve.main: SERVE,
}


@pytest.mark.parametrize(
    ("main", "line", "wanted"),
    [(main, line, wanted) for main, cases in COMMANDS.items() for line, wanted in cases.items()],
)
def test_one_line_names_what_is_wrong(main, line, wanted, refused, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("The king said\n"))
    assert re.search(wanted, refused(main, *shlex.split(line)))


def test_a_failure_ends_the_server(command, monkeypatch):
    def fail(scheduler: Scheduler) -> None:
        raise RuntimeError("no memory is left")

    monkeypatch.setattr(Scheduler, "_warm_up", fail)
    # Signals are the main thread's, which runs the tests.
    monkeypatch.setattr("uvicorn.Server.capture_signals", lambda self: contextlib.nullcontext())
    arguments = ("--port", "0", "--context", "64", "--batch", "1")
    status, _, err = command(serve.main, "--model", "tiny-llama", *arguments)
    assert status == 2 and err.splitlines()[-1] == "error: no memory is left"


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_addresses_to_listen_at(host):
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as free:
        try:
            free.bind((host, 0))
        except OSError:
            pytest.skip("this machine has no such address")
    with serve.listen(host, 0) as listening:
        assert listening.getsockname()[0] in (host, "127.0.0.1")


def test_a_port_in_use(refused):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert "--port" in refused(serve.main, "--port", taken.getsockname()[1])
