"""Models on the hub, against a local server with the hub's interface."""

import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from tiny import LLAMA, add_tokenizer, environment, make_tiny, python, refuses

from infinigen_jax.checkpoint.hub import fetched
from infinigen_jax.checkpoint.source import is_gguf
from infinigen_jax.loading.load import embedded

COMMITS = {"main": "a" * 40, "old": "b" * 40}
CONFIG = json.dumps(LLAMA).encode()
SHARDS = ("model-00001-of-00002.safetensors", "model.safetensors-00002-of-00002.safetensors")
NEEDED = {
    "config.json": CONFIG,
    "generation_config.json": b"{}",
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"x",
    SHARDS[0]: b"1" * 999,
    SHARDS[1]: b"2",
    "model.safetensors.index.json": json.dumps({"weight_map": dict(enumerate(SHARDS))}).encode(),
}
OTHERS = dict.fromkeys(("README.md", "pytorch_model.bin", "modeling_own.py"), b"x")
UNUSED_WEIGHTS = ("consolidated", "model-of-another", "onnx/model")
OTHERS |= {f"{name}.safetensors": b"x" for name in UNUSED_WEIGHTS}
TEXT = {"config.json": CONFIG, "tokenizer.json": b"{}"}
REPOSITORIES = {
    "org/sharded": NEEDED | OTHERS,
    "org/torch": TEXT | {"pytorch_model.bin": b"x"},
    "org/quantised": {
        **{"a.gguf": b"a", "b.gguf": b"b", "c-00001-of-00002.gguf": b"c", "mmproj-F16.gguf": b"m"},
        **{"x.gguf": b"x", "y.gguf": b"y", "Q8/z.GGUF": b"z"},
    },
    "org/adapter": TEXT | {"adapter_model.safetensors": b"x"},
    "org/tekken": {"config.json": CONFIG, "tekken.json": b"x", "model.safetensors": b"x"},
    "org/experts": {"config.json": b'{"model_type": "mixtral"}', "model.safetensors": b"x"},
    "org/partial": TEXT | {"model.safetensors": b"x"},
    "org/private": TEXT | {"model.safetensors": b"x"},
}


class Hub(BaseHTTPRequestHandler):
    """`/api/models/ID/revision/R`, `/api/models/ID/tree/COMMIT` and `/ID/resolve/COMMIT/FILE`."""

    protocol_version = "HTTP/1.1"
    URL = re.compile(
        r"(?:/api/models)?/([^/]+/[^/]+)/(revision|tree|resolve)/([^/?]+)/?([^?]*)(?:\?.*)?"
    )

    def do_GET(self) -> None:
        matched = self.URL.fullmatch(self.path)
        assert matched, self.path
        name, action, revision, file = matched.groups()
        commit = COMMITS.get(revision, revision)
        if name not in REPOSITORIES:
            return self.answer(401, b"", **{"X-Error-Code": "RepoNotFound"})
        if name == "org/private" and self.headers["Authorization"] != "Bearer secret":
            return self.answer(403, b"", **{"X-Error-Code": "GatedRepo"})
        if commit not in COMMITS.values():
            return self.answer(404, b"", **{"X-Error-Code": "RevisionNotFound"})
        files = REPOSITORIES[name]
        if action == "revision":
            return self.answer(200, json.dumps({"id": name, "sha": commit}).encode())
        if action == "tree":
            entries = [
                {"type": "file", "path": path, "size": len(data), "oid": f"{name}{path}"}
                for path, data in files.items()
            ]
            return self.answer(200, json.dumps(entries).encode())
        if file not in files:
            return self.answer(404, b"", **{"X-Error-Code": "EntryNotFound"})
        tag = f'"{name}-{file}"'.replace("/", "-")
        self.answer(200, files[file], **{"ETag": tag, "X-Repo-Commit": commit})

    do_HEAD = do_GET

    def answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


PROGRAM = """
import os, sys
from infinigen_jax.checkpoint.hub import fetched
from infinigen_jax.errors import InputError
for request in sys.argv[1:]:
    name, revision, weights, *token = request.split("@")
    os.environ.update(zip(["HF_TOKEN"], token))
    try:
        print(fetched(name, revision or None, weights=not weights))
    except InputError as error:
        print(error)
"""


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    """Return the server's address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def ask(hub, tmp_path_factory) -> Callable[..., list[str]]:
    """Return `ask(*requests, **environment)`: results or errors of `fetched` in another process.

    huggingface_hub reads its environment once. A request is NAME@REVISION@, with x at the end
    if no weights are needed; a token may follow after another @.
    """
    folder = tmp_path_factory.mktemp("hub")
    given = {"HF_ENDPOINT": hub, "HF_HOME": str(folder)}
    clean = {name: value for name, value in environment().items() if not name.startswith("HF_")}

    def call(*requests: str, **variables: str) -> list[str]:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, *requests],
            env=clean | given | variables,
            cwd=folder,
            capture_output=True,
            text=True,
            check=True,
        )
        assert "Fetching" not in done.stderr and "Traceback" not in done.stderr
        return done.stdout.splitlines()

    return call


def names(folder: str) -> set[str]:
    return {str(file.relative_to(folder)) for file in Path(folder).rglob("*") if file.is_file()}


FETCHED = ["org/torch@@x", "org/sharded@@", "org/sharded@old@", f"org/sharded@{COMMITS['main']}@"]
FETCHED += [
    "org/torch@@",
    "org/quantised/b.gguf@@",
    "org/quantised/Q8/z.GGUF@@",
    "org/experts@@",
    "org/experts@@x",
    "org/partial@@x",
]
REFUSED = {
    "org/absent@@": "no such folder here, and no such model on the hub",
    "org/private@@": "access is restricted; accept its terms on the hub, then set HF_TOKEN",
    "org/sharded@odd@": "has no revision 'odd' on the hub",
    "org/quantised@@": "config.json on the hub; name a file, such as org/quantised/a.gguf or ",
    "org/quantised@@x": "or org/quantised/b.gguf or org/quantised/x.gguf\n",
    "org/adapter@@": "no model.safetensors or pytorch_model.bin on the hub; choose another\n",
    "org/tekken@@": "no tokenizer (tokenizer.json, tokenizer.model, vocab.json) on the hub; choose",
    "org/quantised/c.gguf@@": "no such file on the hub",
    "./org/sharded@main@": "revision main: ./org/sharded is not a model on the hub",
}


@pytest.fixture(scope="module")
def answers(ask) -> list[str]:
    """Return the answers of one process, which mostly spends its time on imports."""
    return ask(*FETCHED, *REFUSED, "org/private@@@secret")


def test_only_needed_files_are_fetched(ask, answers):
    found = answers[: len(FETCHED)]
    settings, sharded, old, pinned, torch, file, upper, refused, experts, _ = found
    assert Path(settings).name == COMMITS["main"] and settings == torch
    assert names(sharded) == names(old) == set(NEEDED) and sharded == pinned != old
    assert (Path(sharded) / SHARDS[0]).read_bytes() == b"1" * 999
    assert names(torch) == set(REPOSITORIES["org/torch"])
    assert file.endswith("b.gguf") and Path(file).read_bytes() == b"b"
    assert names(str(Path(file).parent)) == {"b.gguf", "Q8/z.GGUF"}
    assert Path(upper).read_bytes() == b"z" and is_gguf(Path(upper))
    assert "a mixture of experts" in refused and names(experts) == {"config.json"}
    cached = ["org/sharded@@", "org/torch@@", "org/partial@@x"]
    missing = ["org/partial@@", "org/absent@@"]
    offline = ask(*cached, *missing, HF_HUB_OFFLINE="1")
    assert offline[:2] == [sharded, torch] and names(offline[2]) == set(TEXT)
    assert all("HF_HUB_OFFLINE is set" in line for line in offline[3:])


def test_refusals_in_one_line(ask, answers):
    *lines, private = answers[len(FETCHED) :]
    for (request, message), line in zip(REFUSED.items(), lines, strict=True):
        assert message in f"{line}\n" and request.partition("@")[0] in line
    assert names(private) == {*TEXT, "model.safetensors"}
    unreachable = ask("org/new@@", HF_ENDPOINT="http://127.0.0.1:9")
    assert len(unreachable) == 1 and "the hub cannot be reached" in unreachable[0]


def test_a_path_goes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "sharded").mkdir(parents=True)
    assert fetched("org/sharded") == Path("org/sharded")
    assert fetched(tmp_path / "a" / "b") == tmp_path / "a" / "b"
    refuses("revision x: org/sharded is not", fetched, "org/sharded", "x")


@pytest.mark.slow
def test_commands_take_a_model_of_the_hub(hub, tmp_path):
    """`plan` fetches no weights; a generation equals that of the folder, also offline."""
    vocabulary = json.loads((embedded() / "config.json").read_text())["vocab_size"]
    folder = add_tokenizer(make_tiny(tmp_path / "a", "llama", vocab_size=vocabulary).folder)
    REPOSITORIES["org/real"] = {file.name: file.read_bytes() for file in folder.iterdir()}
    known = {"HF_ENDPOINT": hub, "HF_HOME": str(tmp_path / "hub")}

    def ran(command: str, *arguments: str, said: str = "", **variables: str) -> str:
        given = {"cache": tmp_path / "cache"} | known | variables
        done = python("-m", f"infinigen_jax.{command}", *arguments, **given)
        assert done.returncode == 0 and said in done.stderr, done.stderr
        return done.stdout

    assert "1 x 32 tokens" in ran("plan", "--model", "org/real", "--context", "32")
    assert not [file for file in names(known["HF_HOME"]) if "safetensors" in file]
    request = ["--raw", "--prompt", "Once", "--max-new-tokens", "8", "--ignore-eos", "--model"]
    before = names(str(folder))
    local = ran("generate", *request, str(folder), said="not converted yet")
    assert local.strip() and names(str(folder)) == before
    assert ran("generate", *request, "org/real", "--revision", "old") == local
    offline = {"HF_HUB_OFFLINE": "1"}
    assert ran("generate", *request, "org/real", "--revision", "old", **offline) == local
