"""Modules of this package as processes with a time limit."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from typing import IO


def run_within(
    command: Iterable[str],
    limit: float,
    log: IO[str],
    environment: dict[str, str] | None = None,
) -> tuple[int | None, str]:
    """Run `python -m command`; its stderr goes to `log`.

    Args:
        limit: seconds, after which the process and its children are ended.
        environment: additional variables.

    Returns:
        The exit status, None if it was ended, and its stdout.
    """
    whole = [sys.executable, "-m", *command]
    log.write(f"\n$ {' '.join(whole)}\n")
    log.flush()
    process = subprocess.Popen(
        whole,
        env=os.environ | (environment or {}),
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        start_new_session=True,  # so that its children can be ended with it
    )
    try:
        text, _ = process.communicate(timeout=limit)
        return process.returncode, text
    except subprocess.TimeoutExpired:
        pass
    os.killpg(process.pid, signal.SIGKILL)
    text, _ = process.communicate()
    return None, text
