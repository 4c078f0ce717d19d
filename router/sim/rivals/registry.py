"""Every rival by name: how to make it, with which settings, and which other settings are worth a try."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from router.policy.interface import Policy
from router.policy.simple import ConsistentHash, LeastLoaded, PowerOfTwo, Random, RoundRobin
from router.sim.rivals import aibrix, cache_aware, dynamo, kv_aware, llmd_default, llmd_token_load, smetric, sticky

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class NoSettings:
    """Of a policy that has none."""


@dataclass(frozen=True, slots=True)
class Entry:
    """`make` takes settings of the type of `defaults`; `search` names fields of it with the values to try."""

    defaults: Any
    make: Callable[[random.Random, Any], Policy]
    search: Mapping[str, Sequence[object]]

    @property
    def settings(self) -> type:
        return type(self.defaults)


def _rival(defaults: S, make: Callable[[random.Random, S], Policy], search: Mapping[str, Sequence[object]]) -> Entry:
    return Entry(defaults, make, search)


def _simple(make: Callable[[random.Random], Policy]) -> Entry:
    return Entry(NoSettings(), lambda rng, _: make(rng), {})


RIVALS: Mapping[str, Entry] = {
    "round_robin": _simple(RoundRobin),
    "random": _simple(Random),
    "p2c": _simple(PowerOfTwo),
    "least_loaded": _simple(LeastLoaded),
    "consistent_hash": _simple(ConsistentHash),
    "cache_aware": _rival(cache_aware.CacheAwareSettings(), cache_aware.CacheAware, cache_aware.SEARCH),
    "cache_aware_smg": _rival(cache_aware.SMG, cache_aware.CacheAware, cache_aware.SEARCH),
    "cache_aware_old_sglang": _rival(cache_aware.OLD_SGLANG, cache_aware.CacheAware, cache_aware.SEARCH),
    "kv_aware": _rival(kv_aware.KvAwareSettings(), kv_aware.KvAware, kv_aware.SEARCH),
    "dynamo": _rival(dynamo.DynamoSettings(), dynamo.Dynamo, dynamo.SEARCH),
    "llmd_default": _rival(llmd_default.LlmdDefaultSettings(), llmd_default.LlmdDefault, llmd_default.SEARCH),
    "llmd_precise": _rival(llmd_default.PRECISE, llmd_default.LlmdDefault, llmd_default.SEARCH_PRECISE),
    "llmd_prime_rl": _rival(llmd_default.PRIME_RL, llmd_default.LlmdDefault, llmd_default.SEARCH),
    "llmd_token_load": _rival(llmd_token_load.LlmdTokenLoadSettings(), llmd_token_load.LlmdTokenLoad, llmd_token_load.SEARCH),
    "llmd_token_load_precise": _rival(llmd_token_load.PRECISE, llmd_token_load.LlmdTokenLoad, llmd_token_load.SEARCH_PRECISE),
    "aibrix": _rival(aibrix.AibrixSettings(), aibrix.AibrixPrefixCache, aibrix.SEARCH),
    "sticky_least_loaded": _rival(sticky.StickySettings(), sticky.StickyLeastLoaded, sticky.SEARCH),
    "smetric": _rival(smetric.SmetricSettings(), smetric.Smetric, smetric.SEARCH),
}
