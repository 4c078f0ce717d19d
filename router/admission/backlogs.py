"""How much work of all tenants goes before a given point of fair service, without asking every tenant."""

_BUCKETS = 64


class Backlogs:
    """The tenants' backlogs, counted by powers of two, so that a sum over all tenants costs the same for two and for 10 000.

    A backlog's level is its tokens per weight: fair service brings all tenants to one level, then to the next.
    """

    __slots__ = ("_counts", "_tokens", "_weights")

    def __init__(self) -> None:
        self._counts = [0] * _BUCKETS
        self._tokens = [0.0] * _BUCKETS
        self._weights = [0.0] * _BUCKETS

    def changed(self, before: float, after: float, weight: float) -> None:
        """One tenant's backlog, in tokens; 0 for none."""
        if before > 0.0:
            bucket = _bucket(before / weight)
            self._counts[bucket] -= 1
            if self._counts[bucket]:
                self._tokens[bucket] -= before
                self._weights[bucket] -= weight
            else:  # exactly, so that rounding does not add up
                self._tokens[bucket] = self._weights[bucket] = 0.0
        if after > 0.0:
            bucket = _bucket(after / weight)
            self._counts[bucket] += 1
            self._tokens[bucket] += after
            self._weights[bucket] += weight

    def up_to(self, level: float) -> float:
        """Tokens served when every tenant has got `level` tokens per weight, or all it waits for.

        Exact but for the backlogs within a factor of two of `level`, where it is an upper bound.
        """
        return sum(
            min(self._tokens[bucket], level * self._weights[bucket]) for bucket, count in enumerate(self._counts) if count
        )


def _bucket(level: float) -> int:
    return min(int(level).bit_length(), _BUCKETS - 1)
