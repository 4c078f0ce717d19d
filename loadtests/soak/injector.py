"""Does what the fault deck says, and undoes it when its time is over."""

import asyncio
import contextlib
import json
import random
import signal
from collections import Counter
from collections.abc import Sequence

import httpx

from loadtests.soak.faults import DISABLING, FaultDeck, FaultName, Strike
from loadtests.soak.replicas import Engine, Router

_FAULTS = "/sim/faults"
_PAUSES = {FaultName.PAUSE_KEEP: "keep", FaultName.PAUSE_WAIT: "wait", FaultName.PAUSE_ABORT: "abort"}
_KILLS = {FaultName.KILL: signal.SIGKILL, FaultName.KILL_SLOW_START: signal.SIGKILL, FaultName.TERMINATE: signal.SIGTERM}


class Injector:
    """`done` counts the faults that were done; `failures` tells of those that could not be undone."""

    def __init__(self, router: Router, engines: Sequence[Engine], rng: random.Random) -> None:
        self._router = router
        self._engines = engines
        self._deck = FaultDeck(rng, replicas=len(engines))
        self._disabled: set[int] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.done: Counter[FaultName] = Counter()
        self.failures: list[str] = []

    async def run(self, per_second: float, stop: asyncio.Event) -> None:
        """Strikes until `stop` is set, then heals everything."""
        while not stop.is_set():
            strike = self._deck.deal(self._disabled)
            if strike is not None:
                if strike.name in DISABLING:
                    self._disabled.add(strike.replica)
                task = asyncio.create_task(self._strike(strike))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1 / per_second):
                    await stop.wait()
        await asyncio.gather(*self._tasks)
        for engine in self._engines:
            if not await engine.admin("DELETE", _FAULTS):
                self.failures.append(f"{engine.name} does not answer after its last fault: {engine.process.log_tail}")

    async def _strike(self, strike: Strike) -> None:
        engine = self._engines[strike.replica]
        try:
            if await self._act(strike, engine):
                self.done[strike.name] += 1
        except Exception as error:
            self.failures.append(f"{strike.name} of {engine.name}: {type(error).__name__}: {error}")
        finally:
            if strike.name in DISABLING:
                self._disabled.discard(strike.replica)

    async def _act(self, strike: Strike, engine: Engine) -> bool:
        """Returns when the fault is over; whether it was done at all."""
        name, seconds = strike.name, strike.seconds
        if name in _KILLS:
            engine.process.signal(_KILLS[name])
            await engine.process.wait()
            await asyncio.sleep(seconds / 2)
            await engine.start(*([] if strike.fault is None else ["--fault", json.dumps(strike.fault)]))
            await engine.wait_ready()
            return True
        if name in _PAUSES:
            pausing = asyncio.create_task(engine.admin("POST", f"/pause?mode={_PAUSES[name]}"))
            await asyncio.sleep(seconds)
            await engine.admin("POST", "/resume")
            return await pausing
        match name:
            case FaultName.FREEZE:
                engine.process.signal(signal.SIGSTOP)
                await asyncio.sleep(seconds)
                engine.process.signal(signal.SIGCONT)
                return True
            case FaultName.DRAIN:
                await self._drain(engine, True)
                await asyncio.sleep(seconds)
                await self._drain(engine, False)
                return True
            case FaultName.REMOVE:
                (await self._router.client.delete(f"/admin/replicas/{engine.id}")).raise_for_status()
                await asyncio.sleep(seconds)
                (await self._router.client.post("/admin/replicas", json={"url": engine.url})).raise_for_status()
                return True
            case FaultName.ABORT_ALL:
                return await engine.admin("POST", "/abort_requests", json={})
        is_done = await engine.admin("POST", _FAULTS, json=[strike.fault])
        if name in DISABLING:
            await asyncio.sleep(seconds)
            await engine.admin("DELETE", _FAULTS)
        return is_done

    async def _drain(self, engine: Engine, draining: bool) -> httpx.Response:
        path = f"/admin/replicas/{engine.id}/drain"
        return (await self._router.client.post(path, json={"draining": draining})).raise_for_status()
