"""What admission has done so far, for metrics."""

from router.admission.priorities import RANKED
from router.admission.waiting import Ending, ShedReason
from router.policy.interface import Priority


class Counts:
    """Running totals since the start; they only grow."""

    __slots__ = ("dispatched", "ended", "promoted", "shed")

    def __init__(self) -> None:
        # Placed, at once or after waiting.
        self.dispatched: dict[Priority, int] = dict.fromkeys(RANKED, 0)
        # Dispatched out of turn because they, their class or their tenant had waited too long.
        self.promoted: dict[Priority, int] = dict.fromkeys(RANKED, 0)
        # Refused on arrival.
        self.shed: dict[tuple[Priority, ShedReason], int] = {
            (priority, reason): 0 for priority in RANKED for reason in ShedReason
        }
        # How waiting ended.
        self.ended: dict[tuple[Priority, Ending], int] = {(priority, ending): 0 for priority in RANKED for ending in Ending}
