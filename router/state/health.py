"""Decides what an observation means for a replica's health. Pure."""

from router.types import Health, Observation

# A probe that times out may only mean a busy engine (its HTTP server shares a core with tokenisation), so it takes this
# many in a row to take the replica out. A refused connection needs none: nobody listens.
TIMEOUTS_TO_EJECT = 3


def after_refused(reason: str) -> tuple[Observation, int]:
    """A probe or a request could not connect, or the connection was reset."""
    return Observation(Health.DOWN, reason, is_gone=True), TIMEOUTS_TO_EJECT


def after_timeout(before: Observation, failed_probes: int, reason: str) -> tuple[Observation, int]:
    failed_probes += 1
    if failed_probes < TIMEOUTS_TO_EJECT and before.health in (Health.READY, Health.SWAPPING, Health.DRAINING):
        return before, failed_probes
    return Observation(Health.DOWN, reason), failed_probes
