"""Command line: serve a model over HTTP with OpenAI's interface. `infinigen-serve --help`"""

import argparse
import logging
import os
import re
import signal
import socket
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from infinigen_jax.cli.options import (
    DEFAULT_MODEL,
    add_engine_options,
    add_model_options,
    add_settings,
    load_engine,
)
from infinigen_jax.errors import InputError, Parser, run_command
from infinigen_jax.files.regular import absolute
from infinigen_jax.messages import KEPT, Messages
from infinigen_jax.numeric import Range, whole_number
from infinigen_jax.settings.engine import EngineOptions

if TYPE_CHECKING:
    from infinigen_jax.server.app import Service
    from infinigen_jax.server.scheduler import Scheduler

KEY_VARIABLE = "INFINIGEN_API_KEY"
ORIGIN = r"[a-z][a-z0-9+.-]*://([\w.-]+|\[[0-9a-f:]+\])(:\d+)?"  # no path, not even a last slash


def build_parser() -> Parser:
    """Return the parser; some options are a contract with other programs."""
    parser = Parser(
        prog="python -m infinigen_jax.serve",
        usage="%(prog)s [--model M] [--host H] [--port P] [options]",
        description="Serve a model over OpenAI's HTTP interface, with the KV cache in host memory.",
    )
    add = parser.add_argument_group("model").add_argument
    add_model_options(add)
    text = "name for clients (default: the folder's, or --model)"
    add("--served-model-name", metavar="NAME", help=text)
    add("--chat-template", metavar="F", help="file with a Jinja template (default: the model's)")
    add = parser.add_argument_group("network").add_argument
    add("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    add(
        "--port",
        type=whole_number(0, 65535),
        default=8000,
        help="port (default 8000; 0: any free one)",
    )
    add("--api-key", metavar="K", help=f"key that clients must send (default: ${KEY_VARIABLE})")
    text = "origin whose web pages may call the server; repeatable"
    add("--allow-origin", action="append", default=[], metavar="O", help=text)
    add = parser.add_argument_group("capacity").add_argument
    text = "answers decoded together (default 8)"
    add("--batch", type=whole_number(1), default=8, metavar="N", help=text)
    text = "maximum tokens of a prompt and its answer (default 4096, or the model's positions)"
    add("--context", type=whole_number(2), metavar="N", help=text)
    text = "maximum number of waiting requests (default 64)"
    add("--max-waiting", type=whole_number(1), default=64, metavar="N", help=text)
    text = "host memory for rows of earlier prompts, in GiB (default 1); 0: none"
    add("--prefix-cache-gib", type=Range(0), default=1.0, metavar="G", help=text)
    add("--no-page", action="store_true", help="disable the chat page and heat maps")
    text = "seconds that running requests may take at shutdown (default 30)"
    add("--shutdown-seconds", type=whole_number(0), default=30, metavar="S", help=text)
    add_settings(parser.add_argument_group("answers"), EngineOptions, ("lossless",))
    add_engine_options(parser, pool=False)
    add_settings(parser.experts, EngineOptions, ("draft_tokens", "draft_weights"))
    add = parser.add_argument_group("output").add_argument
    add("--quiet", action="store_true", help="print only warnings and errors to stderr")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = build_parser()
    return run_command(lambda: serve(parser.parse_args(argv)), parser, program=argv is None)


def serve(arguments: argparse.Namespace) -> None:
    """Load a model and serve it until SIGINT or SIGTERM."""
    say = Messages(arguments.quiet)
    try:
        import uvicorn

        from infinigen_jax.server.app import create_app
        from infinigen_jax.server.guard import http_config
    except ModuleNotFoundError as error:
        raise InputError(
            f"the server needs {error.name}; pip install 'infinigen-jax[serve]'"
        ) from None
    with listen(arguments.host, arguments.port) as listening:
        service, scheduler = make_service(arguments), make_scheduler(arguments, say)
        # Most connections of a client's pool are idle; the queue limits the work.
        connections = 2 * (arguments.max_waiting + arguments.batch) + 512
        app = create_app(scheduler, service)
        config = http_config(app, service.drain_seconds, connections)
        host, port = listening.getsockname()[:2]
        host = f"[{host}]" if ":" in host else host
        kept = f" ({KEPT})" if say.kept else ""
        say(f"http://{host}:{port} is starting; a first start compiles{kept} ...")

        class Server(uvicorn.Server):
            def handle_exit(self, sig: int, frame: Any) -> None:
                if self.should_exit and sig == signal.SIGINT:
                    end()
                super().handle_exit(sig, frame)

        server = Server(config)
        scheduler.failed = lambda: setattr(server, "should_exit", True)
        try:
            server.run(sockets=[listening])
        finally:
            if not scheduler.stop(0):
                end()
    if scheduler.failure is not None:
        raise InputError(scheduler.failure)


def end() -> NoReturn:
    """End the process, which Python could not do within a compilation without aborting it."""
    os.write(2, b"interrupted\n")  # print may itself have been interrupted
    os._exit(130)  # as after Ctrl-C


def make_scheduler(arguments: argparse.Namespace, say: Messages) -> "Scheduler":
    from infinigen_jax.server.limits import Limits
    from infinigen_jax.server.scheduler import Scheduler
    from infinigen_jax.text.tokenizer import read_template

    start_logging(arguments.quiet)
    file = arguments.chat_template
    template = None if file is None else read_template(file)
    engine = load_engine(arguments, say)
    if template is not None:
        engine.model.tokenizer.chat_template = template
    sizes = arguments.batch, arguments.context, arguments.max_waiting
    prefix_bytes = int(arguments.prefix_cache_gib * 2**30)
    return Scheduler(engine, Limits(engine, *sizes, prefix_bytes, not arguments.no_page))


def start_logging(quiet: bool) -> None:
    """Write messages to stderr; a request's log line has no prefix, for programs that read it."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("infinigen_jax").setLevel("WARNING" if quiet else "INFO")
    requests = logging.getLogger("infinigen_jax.requests")
    requests.propagate = False
    requests.handlers = [logging.StreamHandler()]


def make_service(arguments: argparse.Namespace) -> "Service":
    from infinigen_jax.server.app import Service

    key = os.environ.get(KEY_VARIABLE) if arguments.api_key is None else arguments.api_key
    key = key and key.strip()  # a file's last line break, which clients cannot send
    if key == "":
        raise InputError(f"--api-key, or {KEY_VARIABLE}: it is empty; give a key, or leave it out")
    for origin in arguments.allow_origin:
        if origin not in ("*", "null") and not re.fullmatch(ORIGIN, origin):
            raise InputError(
                f"--allow-origin {origin}: a browser sends no such origin; give one such as "
                "https://example.org or http://localhost:3000"
            )
    model = arguments.model or DEFAULT_MODEL
    path = absolute(model)
    name = arguments.served_model_name or (path.name if path.exists() else model)
    return Service(name, arguments.shutdown_seconds, key, tuple(arguments.allow_origin))


def listen(host: str, port: int) -> socket.socket:
    if not host:
        raise InputError("--host: it is empty, which would mean all addresses; give one")
    try:
        families = {found[0] for found in socket.getaddrinfo(host, port)}
        family = socket.AF_INET if socket.AF_INET in families else socket.AF_INET6
        return socket.create_server((host, port), family=family, backlog=1024)
    except (OSError, TypeError, UnicodeError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"--host {host} --port {port}: {reason}; use another address") from None


if __name__ == "__main__":
    sys.exit(main())
