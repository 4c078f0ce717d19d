"""The worker processes of one router, each on a Unix socket of its own: worker 0 serves the admin port for all of them.

What worker 0 has of replicas the others take over: pushed to them at each change and once a second, and kept in a file for
those that start anew. Metrics and requests in flight are asked of them when somebody asks worker 0.
"""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec
from prometheus_client import CollectorRegistry, generate_latest

from router.edge.fleet import Fleet, replica_id_of
from router.state.decisions import Decisions, Kept, merged
from router.state.worker_metrics import Family, WorkerMetrics, as_registry, families_of
from router.types import ReplicaId

log = logging.getLogger(__name__)

TIMEOUT_S = 1.0
PUSH_EVERY_S = 1.0
_LENGTH_BYTES = 4

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Seat:
    """Which worker a process is. `incarnation` is its start in Unix nanoseconds."""

    index: int
    count: int
    incarnation: int
    folder: Path  # of the workers' sockets; only this user may enter it

    def socket_of(self, index: int) -> str:
        return str(self.folder / f"{index}.sock")


class FleetMember(msgspec.Struct, frozen=True, array_like=True):
    url: str
    draining: bool
    in_flight: int


class MetricsAnswer(msgspec.Struct, frozen=True, array_like=True):
    incarnation: int
    families: list[Family]


class AskMetrics(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """Answered with MetricsAnswer."""


class AskFleet(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Answered with a list of FleetMember."""


class SetFleet(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Answered with None once these are the replicas."""

    members: list[FleetMember]


class AskDecisions(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Answered with Kept."""

    limit: int
    replica: str | None
    request_id: str | None


_Ask = AskMetrics | AskFleet | SetFleet | AskDecisions
_asks: msgspec.msgpack.Decoder[_Ask] = msgspec.msgpack.Decoder(_Ask)


class Crew:
    def __init__(self, seat: Seat, fleet: Fleet, registry: CollectorRegistry, decisions: Decisions) -> None:
        self._seat = seat
        self._fleet = fleet
        self._registry = registry
        self._decisions = decisions
        self._totals = self._read_totals()
        self._kept_fleet: list[tuple[str, bool]] | None = None  # what is in the file, as far as we wrote it

    async def run(self) -> None:
        """Serves the other workers until cancelled; worker 0 also keeps their replicas equal to its own."""
        server = await asyncio.start_unix_server(self._serve, self._free_path())
        async with server:
            while True:
                await asyncio.sleep(PUSH_EVERY_S)
                if self._seat.index == 0:
                    await self.push()

    async def former_fleet(self) -> list[FleetMember] | None:
        """The replicas that worker 0 had last; None where this one is the first.

        From the file, as the other workers may be too busy to answer; they are asked where it could not be written.
        """
        with contextlib.suppress(OSError, msgspec.DecodeError):
            return msgspec.msgpack.decode(self._fleet_file.read_bytes(), type=list[FleetMember])
        for answer in await self._ask_others(AskFleet(), list[FleetMember]):
            if answer is not None:
                return answer
        return None

    def apply(self, members: Sequence[FleetMember]) -> None:
        """Makes the replicas here equal to these."""
        wanted = {replica_id_of(member.url): member for member in members}
        present = {replica.id: replica for replica in self._fleet.table.all()}
        for replica_id in present.keys() - wanted.keys():
            self._fleet.remove(replica_id)
        for replica_id, member in wanted.items():
            replica = present.get(replica_id) or self._fleet.add(member.url)
            if replica.draining != member.draining:
                self._fleet.table.drain(replica_id, member.draining)

    async def push(self) -> None:
        """Tells the others of the replicas here, and waits a second at most. Whoever does not hear it will the next time."""
        members = self._members()
        self._keep(members)
        await self._ask_others(SetFleet(members), type(None))

    async def in_flight_elsewhere(self) -> Counter[ReplicaId]:
        """Requests that the other workers have in flight on each replica."""
        total: Counter[ReplicaId] = Counter()
        for members in await self._ask_others(AskFleet(), list[FleetMember]):
            for member in members or ():
                total[replica_id_of(member.url)] += member.in_flight
        return total

    async def metrics(self) -> bytes:
        """All workers' metrics in Prometheus' text format."""
        self._totals.heard(self._seat.index, self._seat.incarnation, families_of(self._registry))
        for index, answer in zip(self._others(), await self._ask_others(AskMetrics(), MetricsAnswer), strict=True):
            if answer is None:
                self._totals.missed(index)
            else:
                self._totals.heard(index, answer.incarnation, answer.families)
        self._write_totals()
        return generate_latest(as_registry(self._totals.all()))

    async def decisions(self, *, limit: int, replica: str | None, request_id: str | None) -> Kept:
        """Of all workers; those that do not answer within a second are left out."""
        ask = AskDecisions(limit, replica, request_id)
        parts = [self._kept(ask), *(kept for kept in await self._ask_others(ask, Kept) if kept is not None)]
        return merged(parts, limit)

    def _kept(self, ask: AskDecisions) -> Kept:
        return self._decisions.kept(limit=ask.limit, replica=ask.replica, request_id=ask.request_id)

    def _free_path(self) -> str:
        path = self._seat.socket_of(self._seat.index)
        Path(path).unlink(missing_ok=True)  # of a predecessor that was killed
        return path

    def _members(self) -> list[FleetMember]:
        return [FleetMember(replica.url, replica.draining, replica.in_flight) for replica in self._fleet.table.all()]

    def _others(self) -> list[int]:
        return [index for index in range(self._seat.count) if index != self._seat.index]

    async def _ask_others(self, ask: _Ask, answer: type[T]) -> list[T | None]:
        """Their answers in the order of the workers; None for each that does not answer within a second."""
        decoder = msgspec.msgpack.Decoder(answer)
        payload = msgspec.msgpack.encode(ask)

        async def of(index: int) -> T | None:
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    reader, writer = await asyncio.open_unix_connection(self._seat.socket_of(index))
                    try:
                        await _write(writer, payload)
                        return decoder.decode(await _read(reader))
                    finally:
                        writer.close()
            except (OSError, EOFError, TimeoutError, msgspec.DecodeError):
                return None

        return list(await asyncio.gather(*(of(index) for index in self._others())))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await _write(writer, msgspec.msgpack.encode(self._answer(_asks.decode(await _read(reader)))))
        except (OSError, EOFError, TimeoutError, msgspec.DecodeError) as error:
            log.debug("another worker's question was not answered: %r", error)
        except Exception:  # a fault of ours in an answer must not end the requests that run
            log.exception("another worker's question could not be answered")
        finally:
            writer.close()

    def _answer(self, ask: _Ask) -> MetricsAnswer | list[FleetMember] | Kept | None:
        if isinstance(ask, AskDecisions):
            return self._kept(ask)
        if isinstance(ask, AskMetrics):
            return MetricsAnswer(self._seat.incarnation, families_of(self._registry))
        if isinstance(ask, AskFleet):
            return self._members()
        self.apply(ask.members)
        return None

    @property
    def _fleet_file(self) -> Path:
        return self._seat.folder / "fleet"

    def _keep(self, members: Sequence[FleetMember]) -> None:
        """Worker 0 only."""
        fleet = [(member.url, member.draining) for member in members]
        if fleet == self._kept_fleet:
            return
        try:
            _replace(self._fleet_file, msgspec.msgpack.encode(members))
            self._kept_fleet = fleet
        except OSError:  # the disk is full: no file is better than one that is no longer true
            self._kept_fleet = None
            with contextlib.suppress(OSError):
                self._fleet_file.unlink()

    @property
    def _totals_file(self) -> Path:
        return self._seat.folder / "totals"

    def _read_totals(self) -> WorkerMetrics:
        """Counters never fall, also when worker 0 is started anew."""
        try:
            return msgspec.msgpack.decode(self._totals_file.read_bytes(), type=WorkerMetrics)
        except (OSError, msgspec.DecodeError):
            return WorkerMetrics()

    def _write_totals(self) -> None:
        with contextlib.suppress(OSError):  # a full disk costs no scrape
            _replace(self._totals_file, msgspec.msgpack.encode(self._totals))


def _replace(file: Path, content: bytes) -> None:
    """At once: whoever reads it sees the old or the new. Raises OSError."""
    new = file.with_suffix(".new")
    new.write_bytes(content)
    new.replace(file)


async def _write(writer: asyncio.StreamWriter, payload: bytes) -> None:
    writer.write(len(payload).to_bytes(_LENGTH_BYTES, "big") + payload)
    await writer.drain()


async def _read(reader: asyncio.StreamReader) -> bytes:
    """Raises EOFError if the other side ends early."""
    return await reader.readexactly(int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "big"))
