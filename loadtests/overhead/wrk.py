"""Runs wrk, the closed-loop load generator, and reads what it counted."""

import json
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from intellect.problem import Problem
from loadtests.overhead.engine_answers import CHAT_PATH, chat_body
from loadtests.overhead.routers import HOST
from loadtests.overhead.upstreams import program

_SCRIPT = Path(__file__).with_name("request.lua")
_REQUEST_TIMEOUT_S = 30
_SLACK_S = 60.0


@dataclass(frozen=True, slots=True)
class Load:
    """`bytes` are those that reached the client, heads and chunk framing included; `errors`: of sockets, and not 2xx."""

    requests: int
    bytes: int
    errors: int


class Wrk:
    """Bodies of requests are kept in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._program = program("wrk")
        self._folder = folder

    def run(self, port: int, *, prompt_bytes: int, stream: bool, connections: int, seconds: float) -> Load:
        """One thread, `connections` requests at a time, for `seconds`, rounded to whole ones."""
        body = self._folder / f"body-{prompt_bytes}-{'stream' if stream else 'whole'}.json"
        body.write_bytes(chat_body(prompt_bytes, stream))
        command = [self._program, "-t1", f"-c{connections}", f"-d{max(1, round(seconds))}s"]
        command += [
            "--timeout",
            f"{_REQUEST_TIMEOUT_S}s",
            "-s",
            str(_SCRIPT),
            f"http://{HOST}:{port}{CHAT_PATH}",
            "--",
            str(body),
        ]
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds + _SLACK_S, check=False
        )
        return read_load(done.stdout, done.stderr)


def read_load(output: str, complaint: str) -> Load:
    """From what wrk printed.

    Raises:
        Problem: there is no result in it.
    """
    found = re.search(r"^result (\{.*\})$", output, re.MULTILINE)
    if found is None:
        raise Problem(f"wrk gave no result: {' '.join((complaint or output).split())[-500:] or 'it printed nothing'}")
    counts = json.loads(found[1])
    return Load(requests=counts["requests"], bytes=counts["bytes"], errors=counts["errors"])
