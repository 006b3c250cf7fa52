"""Python modules as processes: with a time limit, or with their use of resources."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

# Starts a process from a small one: the peak of a process begins at that of the one it came from.
LAUNCHER = """
import json, resource, subprocess, sys, time
start = time.perf_counter()
status = subprocess.call(sys.argv[2:])
wall = time.perf_counter() - start
usage = resource.getrusage(resource.RUSAGE_CHILDREN)
with open(sys.argv[1], "w") as file:
    json.dump([wall, usage.ru_utime, usage.ru_stime, usage.ru_maxrss], file)
sys.exit(status)
"""


def run_within(
    command: Iterable[str], limit: float, log: IO[str], environment: Mapping[str, str]
) -> tuple[str, str]:
    """Run `python -m command` with further variables; its stderr goes to `log`.

    After `limit` seconds the process and its children are ended. Return "done", "out of time" or
    the exit status, and its stdout.
    """
    whole = [sys.executable, "-m", *command]
    log.write(f"\n$ {' '.join(whole)}\n")
    log.flush()
    process = subprocess.Popen(
        whole,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        start_new_session=True,  # so that its children can be ended with it
    )
    try:
        text, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return "out of time", process.communicate()[0]
    return f"status {process.returncode}" if process.returncode else "done", text


def usage_of(command: Iterable[str], cache: str | Path, **settings: Any) -> dict[str, float]:
    """Run `python -m command`; return its wall seconds, processor seconds and peak bytes.

    `cache` is the user's cache folder of the process. Raise SystemExit if the command fails.
    """
    whole = [sys.executable, "-m", *command]
    environment = os.environ | {"XDG_CACHE_HOME": str(cache)}
    with tempfile.NamedTemporaryFile() as result:
        launched = [sys.executable, "-S", "-c", LAUNCHER, result.name, *whole]
        if subprocess.call(launched, env=environment, **settings):
            raise SystemExit(f"{' '.join(whole)}: failed")
        wall, user, system, peak = json.load(result)
    return {
        "wall_seconds": wall,
        "processor_seconds": user + system,
        "peak_bytes": peak * 1024,
    }
