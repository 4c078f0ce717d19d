"""The engines' stand-ins: nginx where an answer must come at once, a paced one where tokens must."""

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from intellect.problem import Problem
from loadtests.overhead.engine_answers import CHAT, CHAT_PATH, MODELS, NOT_FOUND, RENDER_PATH, RENDERED, metrics
from loadtests.overhead.processes import free_ports, running
from loadtests.overhead.routers import HOST

UPSTREAMS = 4
_ROOT = Path(__file__).resolve().parents[2]


def program(name: str) -> str:
    """Where a system program lies.

    Raises:
        Problem: it is not installed.
    """
    found = shutil.which(name) or shutil.which(name, path="/usr/sbin:/usr/local/sbin")
    if found is None:
        raise Problem(f"{name}: not found, the benchmark needs it; install it (Debian: apt-get install {name})")
    return found


@contextmanager
def instant_upstreams(folder: Path) -> Iterator[list[int]]:
    """Four ports that answer every request at once, not streamed. Yields the ports."""
    ports = free_ports(UPSTREAMS)
    configuration = folder / "nginx.conf"
    configuration.write_text(nginx_configuration(folder, ports))
    command = [program("nginx"), "-e", str(folder / "nginx.error.log"), "-c", str(configuration)]
    with running("nginx", command, log=folder / "nginx.log", folder=folder) as tree:
        tree.wait_ready(ports[0])
        yield ports


@contextmanager
def paced_upstreams(folder: Path, *, chunks: int, held: bool) -> Iterator[list[int]]:
    """Four ports that stream `chunks` events, one every 20 ms, then end or (`held`) stay silent. Yields the ports."""
    ports = free_ports(UPSTREAMS)
    command = [sys.executable, "-m", "loadtests.overhead.paced_upstream", "--chunks", str(chunks), "--interval-s", "0.02"]
    command += ["--held"] if held else []
    command += ["--ports", *map(str, ports)]
    with running("the paced upstream", command, log=folder / "paced.log", folder=_ROOT) as tree:
        tree.wait_ready(ports[0])
        yield ports


def nginx_configuration(folder: Path, ports: list[int]) -> str:
    """One worker with fixed answers; all its files lie in `folder`, so that it needs no rights."""
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    temporary = " ".join(f"{kind}_temp_path {folder}/{kind};" for kind in kinds)
    listens = " ".join(f"listen {HOST}:{port} backlog=2048;" for port in ports)
    state = metrics(running=0, iterations=0).decode()
    return f"""daemon off; worker_processes 1; pid {folder}/nginx.pid;
events {{ worker_connections 4096; }}
http {{
  access_log off; {temporary}
  keepalive_requests 100000000; keepalive_timeout 65s; client_max_body_size 64m; client_body_buffer_size 1m;
  default_type application/json;
  server {{
    {listens}
    location = {CHAT_PATH} {{ return 200 '{CHAT.decode()}'; }}
    location = {RENDER_PATH} {{ return 200 '{RENDERED.decode()}'; }}
    location = /v1/models {{ return 200 '{MODELS.decode()}'; }}
    location = /health {{ return 200; }}
    location = /metrics {{ default_type text/plain; return 200 '{state}'; }}
    location / {{ return 404 '{NOT_FOUND.decode()}'; }}
  }}
}}
"""
