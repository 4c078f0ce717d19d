"""Which failures of one replica another may make good, and how often. Pure."""

from router.admission.retry_budget import RetryBudget
from router.types import Verdict

# Not 501 or 505: another engine of the same kind would say the same.
RETRIED_STATUSES = frozenset({429, 500, 502, 503, 504})
# A full queue is pressure, no fault.
BUSY_STATUSES = frozenset({429, 503})


def verdict_of(status: int) -> Verdict:
    """What an engine's status says about it: a refused request is the request's fault."""
    if status in BUSY_STATUSES:
        return Verdict.NEUTRAL
    return Verdict.BAD if status >= 500 else Verdict.GOOD


class Retries:
    """Counts and grants the retries of all requests."""

    def __init__(self, budget: RetryBudget, *, attempts_max: int) -> None:
        self._budget = budget
        self._attempts_max = attempts_max

    def success(self, now: float) -> None:
        self._budget.success(now)

    def client_retry(self, now: float) -> None:
        self._budget.client_retry(now)

    def may_retry(self, attempts: int, now: float) -> bool:
        """Whether a request that was sent `attempts` times may be sent once more; if so, it is counted."""
        return attempts < self._attempts_max and self._budget.try_spend(now)
