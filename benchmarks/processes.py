"""Python modules as processes: with a time limit, or with their use of resources."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any


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
    start = time.perf_counter()
    process = subprocess.Popen(whole, env=os.environ | {"XDG_CACHE_HOME": str(cache)}, **settings)
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.perf_counter() - start
    if status:
        raise SystemExit(f"{' '.join(whole)}: failed")
    return {
        "wall_seconds": wall,
        "processor_seconds": usage.ru_utime + usage.ru_stime,
        "peak_bytes": usage.ru_maxrss * 1024,
    }
