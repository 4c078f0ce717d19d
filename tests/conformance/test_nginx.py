"""Entry 32 of the corpus: behind a real nginx with its default buffering, each event still arrives as it is written."""

import asyncio
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.conformance.replies import CHAT
from tests.conformance.streams import ASKED, DONE, chunk
from tests.ports import free_port
from tests.router.process import RouterProcess
from tests.scripted_engine import LAST_CHUNK, SSE_HEAD, ScriptedEngine, ScriptedRequest, chunked
from tests.waiting import wait_until

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
CONFIG = """
daemon off;
worker_processes 1;
pid {folder}/nginx.pid;
error_log {folder}/error.log;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    server {{
        listen 127.0.0.1:{port};
        location / {{ proxy_pass {router}; proxy_http_version {version}; }}
    }}
}}
"""
EVENTS = 20
LATE_S = 0.02

pytestmark = pytest.mark.skipif(NGINX is None, reason="needs the program nginx (Debian package nginx-light)")


@pytest.fixture(scope="module", params=["1.0", "1.1"])
def nginx(
    request: pytest.FixtureRequest, scripted_router: RouterProcess, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """An nginx in front of the router, which speaks HTTP/1.0 (its default) or 1.1 to it."""
    assert NGINX is not None
    folder: Path = tmp_path_factory.mktemp("nginx")
    port = free_port()
    config = folder / "nginx.conf"
    config.write_text(CONFIG.format(folder=folder, port=port, router=scripted_router.url, version=request.param))
    command = [NGINX, "-e", f"{folder}/error.log", "-c", str(config), "-p", str(folder)]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        assert process.poll() is None, (folder / "error.log").read_text()
        try:
            return httpx.get(f"{url}/health").status_code == 200
        except httpx.TransportError:
            return False

    try:
        wait_until(answers, 10, "nginx to listen")
        yield url
    finally:
        process.terminate()
        process.wait(10)


async def test_b32_events_pass_nginx_as_they_come(scripted: ScriptedEngine, nginx: str) -> None:
    """Within 20 ms of the engine's writing them: nothing on the way collects them."""
    written: list[float] = []

    async def script(_: ScriptedRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(SSE_HEAD)
        for number in range(EVENTS):
            written.append(time.monotonic())
            writer.write(chunked(chunk({"content": str(number), **({"role": "assistant"} if number == 0 else {})})))
            await writer.drain()
            await asyncio.sleep(0.03)  # the gap is what keeps events apart
        writer.write(chunked(chunk({}, "stop"), DONE) + LAST_CHUNK)

    scripted.script = script
    seen: list[float] = []
    received = b""
    async with httpx.AsyncClient(base_url=nginx, timeout=10) as http, http.stream("POST", CHAT, json=ASKED) as response:
        assert response.status_code == 200
        async for part in response.aiter_raw():
            received += part
            now = time.monotonic()
            seen.extend([now] * (received.count(b"\n\n") - len(seen)))
    assert received.endswith(DONE)
    delays = sorted(at - was for was, at in zip(written, seen, strict=False))
    # A busy machine may be late with one or two; what is collected is late with nearly all.
    assert delays[int(EVENTS * 0.8)] < LATE_S, delays


async def test_b32_a_broken_stream_is_broken_behind_nginx_too(scripted: ScriptedEngine, nginx: str) -> None:
    """The client sees the error event, and no clean end where the protocol can say so."""

    async def script(_: ScriptedRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(SSE_HEAD + chunked(chunk({"role": "assistant", "content": "half"})))
        await writer.drain()
        writer.close()

    scripted.script = script
    received = b""
    async with httpx.AsyncClient(base_url=nginx, timeout=10) as http:
        try:
            async with http.stream("POST", CHAT, json=ASKED) as response:
                async for part in response.aiter_raw():
                    received += part
        except httpx.RemoteProtocolError:
            pass
    assert b'data: {"error":' in received
    assert b"[DONE]" not in received
