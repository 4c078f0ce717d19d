"""A redis-server of a test's own: on a free port of 127.0.0.1, without persistence, in a folder that goes with it."""

import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.ports import free_port
from tests.waiting import wait_until

REDIS = shutil.which("redis-server") or shutil.which("redis-server", path="/usr/sbin:/usr/local/bin")

needs_redis = pytest.mark.skipif(REDIS is None, reason="needs the program redis-server (Debian package redis-server)")


@dataclass
class RedisServer:
    folder: Path
    arguments: tuple[str, ...] = ()
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Returns when it answers. Starts on the same port again after `kill`."""
        assert REDIS is not None
        command = [REDIS, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        command += ["--dir", str(self.folder), *self.arguments]
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=self.folder
        )
        wait_until(self._answers, 10, "redis-server to answer")

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(10)

    def stop(self) -> None:
        """It stays alive and keeps its connections, but does nothing until `resume`."""
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGCONT)

    def command(self, *words: str) -> bytes:
        """The beginning of the answer to one command, as it stands on the wire."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=2) as connection:
            connection.sendall(b"*%d\r\n" % len(words))
            for word in words:
                connection.sendall(b"$%d\r\n%b\r\n" % (len(word.encode()), word.encode()))
            return connection.recv(65536)

    def _answers(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, f"redis-server ended with status {self.process.returncode}"
        try:
            return self.command("PING").startswith((b"+PONG", b"-NOAUTH"))
        except OSError:
            return False


@contextmanager
def start_redis(*arguments: str) -> Iterator[RedisServer]:
    with tempfile.TemporaryDirectory() as folder:
        server = RedisServer(Path(folder), arguments)
        try:
            server.start()
            yield server
        finally:
            if server.process is not None:
                server.process.kill()
                server.process.wait(10)
