"""Replicas of the server on the machines of a Ray cluster, with one address, by Ray Serve.

    pip install '.[serve]' 'ray[serve]>=2.60'
    python deploy/ray_serve.py --replicas 2 --model converted/Qwen2.5-7B --context 32k

All other options are those of infinigen-serve; `--host` and `--port` are the addresses of Ray's
proxies. Each replica is a process with the model, a batch and a prefix cache of its own. It gets no
requests before its warm-up has ended, and Ray replaces it if its scheduler fails. Ray's proxies
pass streams on, and tell a replica that a client has gone away.
"""

import argparse
import asyncio
import signal
import sys
import threading
from typing import Any

from ray import serve

from infinigen_jax.errors import InputError, run_command
from infinigen_jax.messages import Messages
from infinigen_jax.numeric import Range, whole_number
from infinigen_jax.serve import build_parser, make_scheduler, make_service
from infinigen_jax.server.app import create_app


@serve.ingress()
class Replica:
    """One server; Ray calls its methods."""

    def __init__(self, arguments: argparse.Namespace):
        self._service = make_service(arguments)
        self._scheduler = make_scheduler(arguments, Messages(arguments.quiet))

    def __serve_build_asgi_app__(self) -> Any:
        return create_app(self._scheduler, self._service)

    async def check_health(self) -> None:
        """Wait for the end of the warm-up; then raise an error if the scheduler has ended."""
        while self._scheduler.failure is None and not self._scheduler.ready.is_set():
            await asyncio.sleep(0.1)
        if self._scheduler.failure is not None:
            raise RuntimeError(self._scheduler.failure)


def run(arguments: argparse.Namespace) -> None:
    """Start the replicas, and wait for SIGINT or SIGTERM."""
    options = {"num_cpus": arguments.replica_cpus, "num_gpus": arguments.replica_gpus}
    deployment = serve.deployment(
        num_replicas=arguments.replicas,
        ray_actor_options=options,
        # More requests wait in Ray's proxies, not in a replica's queue.
        max_ongoing_requests=arguments.batch + arguments.max_waiting,
        graceful_shutdown_timeout_s=arguments.shutdown_seconds,
    )(Replica)
    serve.start(http_options={"host": arguments.host, "port": arguments.port})
    try:
        serve.run(deployment.bind(arguments), name="infinigen")
    except RuntimeError as error:
        raise InputError(f"the replicas do not start ({error}); see Ray's log") from None
    print(f"http://{arguments.host}:{arguments.port}", file=sys.stderr, flush=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        serve.shutdown()


def main() -> int:
    """Run the command; returns the exit status."""
    parser = build_parser()
    parser.prog = "python deploy/ray_serve.py"
    add = parser.add_argument_group("replicas").add_argument
    add("--replicas", type=whole_number(1), default=2, metavar="N", help="servers (default 2)")
    add("--replica-cpus", type=Range(0), default=1, metavar="N", help="cores of each (default 1)")
    add("--replica-gpus", type=Range(0), default=0, metavar="N", help="GPUs of each (default 0)")
    return run_command(lambda: run(parser.parse_args()), parser)


if __name__ == "__main__":
    sys.exit(main())
