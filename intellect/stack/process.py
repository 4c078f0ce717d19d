"""One child of the stack, held by the leash: whatever happens to us, it does not stay behind."""

import asyncio
import os
import sys
from datetime import UTC, datetime
from pathlib import Path

from intellect.stack.plan import LEASH_GRACE_S, ProcessPlan
from server import leash

_LOG_BYTES_MAX = 8 << 20
_LOG_BYTES_KEPT = 1 << 20
_TAIL_BYTES = 32_768
_RUN_MARK = "---- "


class LeashedProcess:
    """A started process with its output in a log file. Ends when we close its pipe, or end ourselves."""

    def __init__(self, plan: ProcessPlan, process: asyncio.subprocess.Process) -> None:
        self.plan = plan
        self._process = process

    @classmethod
    async def start(cls, plan: ProcessPlan) -> "LeashedProcess":
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", **plan.variables}
        holder = (sys.executable, "-I", "-S", leash.__file__, "--grace-s", str(LEASH_GRACE_S), "--")
        plan.log.parent.mkdir(parents=True, exist_ok=True)
        shorten_log(plan.log)
        with plan.log.open("ab") as log:
            # The log goes on over several runs; what stands before this line is not about this one.
            log.write(f"{_RUN_MARK}{plan.name} started at {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC ----\n".encode())
            log.flush()
            process = await asyncio.create_subprocess_exec(
                *holder, *plan.command, stdin=asyncio.subprocess.PIPE, stdout=log, stderr=log, env=environment
            )
        return cls(plan, process)

    @property
    def is_running(self) -> bool:
        return self._process.returncode is None

    async def wait(self) -> int:
        """Its exit status; 128 + N if signal N ended it."""
        return await self._process.wait()

    async def stop(self, timeout_s: float) -> None:
        """Asks it to end, and ends it by force after `timeout_s` seconds."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(timeout_s):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()  # the leash's other half kills everything below at once
            await self._process.wait()


def shorten_log(log: Path) -> None:
    """Keeps the end of a log that has grown too long."""
    if not log.exists() or log.stat().st_size <= _LOG_BYTES_MAX:
        return
    log.write_bytes(read_end(log, _LOG_BYTES_KEPT).partition(b"\n")[2])


def last_lines(log: Path, count: int) -> list[str]:
    """The last `count` lines that are not empty; none if there is no log."""
    if not log.exists():
        return []
    lines = (line.strip() for line in read_end(log, _TAIL_BYTES).decode("utf-8", "replace").splitlines())
    return [line for line in lines if line][-count:]


def lines_of_last_run(log: Path, count: int) -> list[str]:
    """As last_lines, without what an earlier process wrote."""
    lines = last_lines(log, count)
    starts = [position for position, line in enumerate(lines) if line.startswith(_RUN_MARK)]
    return lines[starts[-1] + 1 :] if starts else lines


def read_end(log: Path, size: int) -> bytes:
    with log.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - size))
        return file.read()
