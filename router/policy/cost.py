"""The cost of placing a request on a replica, in predicted seconds: its prices and its terms."""

from dataclasses import dataclass
from typing import NamedTuple

from router.types import ReplicaId


@dataclass(frozen=True, slots=True)
class PredictedSettings:
    """One configuration for every load, found with the simulator (docs/log.md)."""

    decode: float = 0.1  # price of a second of decoding, against one before the first token
    stall: float = 0.3  # price of a second that a decoding sequence stands still while a prompt is computed
    preempted: float = 4.0  # price of computing again what running requests lose
    evicted: float = 0.5  # price of computing again what is cached, which may never be asked for
    # A replica with more than this queued could not start a request soon: the request waits in the router instead.
    startable_s: float = 1.0
    # Share of the KV cache that may be in use, as answers are half written on average, when one more request is sent.
    kv_full: float = 1.05
    ties_s: float = 0.0005


class CostTerms(NamedTuple):
    """Why a replica was chosen or not. Seconds, but for the tokens; see `router.policy.predicted`."""

    replica: ReplicaId
    rank: int
    cached_tokens: float  # of the prompt, predicted
    wait: float
    own: float
    step: float
    decode: float
    evict: float
    room: float
    is_startable: bool

    @property
    def total(self) -> float:
        return self.wait + self.own + self.step + self.decode + self.evict + self.room
