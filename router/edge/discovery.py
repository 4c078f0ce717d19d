"""Replicas named in a file that is read again when it changes."""

import asyncio
import logging
from pathlib import Path

from router.config import ConfigError, check_replica_url
from router.edge.fleet import Fleet, replica_id_of
from router.types import ReplicaId

log = logging.getLogger(__name__)


async def follow_file(fleet: Fleet, path: Path, interval_s: float) -> None:
    """Keeps the fleet equal to a file of replica URLs, one a line (blank lines and # comments allowed), until cancelled.

    Replicas that came from elsewhere are left alone. A file that cannot be read or has a bad line changes nothing.
    """
    from_file: set[ReplicaId] = set()
    last_text: str | None = None
    last_problem: str | None = None
    while True:
        problem = None
        try:
            text = await asyncio.to_thread(path.read_text)
            if text != last_text:
                from_file = apply_urls(fleet, parse_replica_file(text), from_file)
                last_text = text
        except OSError as error:
            problem = f"cannot be read: {error.strerror}"
        except (ConfigError, UnicodeDecodeError) as error:
            problem = f"has a fault: {error}"
        if problem is not None and problem != last_problem:
            log.warning("replica file %s %s; the replicas stay as they are", path, problem)
        last_problem = problem
        await asyncio.sleep(interval_s)


def parse_replica_file(text: str) -> list[str]:
    """URLs in order, without repeats. Raises ConfigError naming the line."""
    urls: dict[str, None] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        url = line.partition("#")[0].strip()
        if not url:
            continue
        try:
            check_replica_url(url)
        except ConfigError as error:
            raise ConfigError(f"line {number}: {error}") from error
        urls[url] = None
    return list(urls)


def apply_urls(fleet: Fleet, urls: list[str], from_file: set[ReplicaId]) -> set[ReplicaId]:
    """Adds and removes what the file's URLs ask for; returns the ids that the file now accounts for."""
    wanted = {replica_id_of(url): url for url in urls}
    present = {replica.id for replica in fleet.table.all()}
    for replica_id in (from_file - wanted.keys()) & present:
        fleet.remove(replica_id)
        log.info("replica %s left the replica file", replica_id)
    new = wanted.keys() - present
    for replica_id in new:
        fleet.add(wanted[replica_id])
    return new | (from_file & wanted.keys())
