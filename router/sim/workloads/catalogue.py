"""Every workload by its name: what is sent, to which fleet, and what counts as served well."""

from collections.abc import Callable, Mapping
from itertools import count

from router.policy.interface import Priority
from router.sim.fleet import EngineLimits, FleetSettings
from router.sim.prompts import AGENT_BYTES_PER_TOKEN, CHAT_BYTES_PER_TOKEN
from router.sim.timing import H200_GLM, StepTiming
from router.sim.workload import Workload
from router.sim.workloads.draws import Quantiles, Skewed
from router.sim.workloads.extraction import Extraction, JobShape
from router.sim.workloads.issuer import Issuer
from router.sim.workloads.mixture import Mixture
from router.sim.workloads.rollouts import GroupShape, RolloutGroups
from router.sim.workloads.scenario import Scenario, Slo
from router.sim.workloads.sessions import Sessions, SessionShape
from router.sim.workloads.shared_prefixes import Groups, Ladder, Singles

# llm-d's ladders: the share of the fleet's KV that their prompts take gives them their names. Published are steps from 3 to 60
# and from 3 to 20 requests/s, several times what the fleet can serve in the end; here they are multiplied by what makes load
# 1.0 mean the same as elsewhere.
_RATES_73 = tuple(0.3 * rate for rate in range(3, 61, 3))
_RATES_146 = tuple(0.2 * rate for rate in range(3, 61, 3))
_RATES_37 = tuple(0.45 * rate for rate in range(3, 21))
_GROUPS_73 = Groups(groups=150, users=5, system_tokens=6000, question_tokens=1200, output_tokens=1000)
_GROUPS_146 = _GROUPS_73._replace(groups=300)
_GROUPS_37 = Groups(groups=83, users=3, system_tokens=8000, question_tokens=1000, output_tokens=1000)

# Turns as of 610 recorded coding sessions (5 at least, median 29, 90 % below 56, 99 % below 85, 99 at most), a quarter of them
# so that sessions begin and end within a run; the mean becomes 8.
_CODING_TURNS = Quantiles(((0.0, 1.25), (0.5, 7.25), (0.9, 14.0), (0.99, 21.25), (1.0, 24.75)))
_CODING = SessionShape(
    bytes_per_token=AGENT_BYTES_PER_TOKEN,
    kinds=4,
    system_tokens=4000,
    opening_tokens=Skewed(900, 0.8, 8000),
    step_tokens=Skewed(400, 1.1, 6000),
    output_tokens=Skewed(120, 0.8, 1500),
    think_s=Skewed(1.5, 1.0, 30.0),
    turns=_CODING_TURNS,
    tells_session=True,
)
_CODING_ANONYMOUS = _CODING._replace(tells_session=False)
# The chat template drops what the model thought before its earlier answers: two fifths of them stay.
_CODING_REASONING = _CODING._replace(kept=0.4, output_tokens=Skewed(250, 0.9, 3000))
_CHAT = SessionShape(
    bytes_per_token=CHAT_BYTES_PER_TOKEN,
    kinds=3,
    system_tokens=800,
    opening_tokens=Skewed(80, 1.0, 2000),
    step_tokens=Skewed(60, 1.0, 2000),
    output_tokens=Skewed(220, 0.7, 1500),
    think_s=Skewed(6.0, 0.8, 40.0),
    turns=Quantiles(((0.0, 1.0), (0.5, 3.0), (0.9, 8.0), (1.0, 16.0))),
    tells_session=False,
)
_ROLLOUTS = GroupShape(
    siblings=16,
    burst_s=0.1,
    system_tokens=400,
    prompt_tokens=Skewed(1800, 0.6, 12_000),
    output_tokens=Skewed(1000, 1.3, 65_536),
)
_JOBS = JobShape(
    jobs=24,
    template_tokens=Skewed(1000, 0.3, 2500),
    documents=Skewed(120, 0.6, 600),
    document_tokens=Skewed(400, 0.8, 4000),
    output_tokens=Skewed(30, 0.6, 200),
)
_KV = 262_144  # tokens on one H200 beside the weights
_SMALL_KV = 65_536
# Long prompts behind long answers take seconds of waiting for granted; people who chat and agents that loop do not.
_TTFT_CHAT_S, _TTFT_S, _TTFT_JOB_S, _TTFT_BATCH_S = 1.0, 2.0, 3.0, 30.0


def _ladder(name: str, groups: Groups, rates: tuple[float, ...]) -> Callable[[float, float], Workload]:
    return lambda load, duration_s: Ladder(name, groups, [rate * load for rate in rates], duration_s, _TTFT_S)


def _agents(name: str, shape: SessionShape, rate: float) -> Callable[[float, float], Workload]:
    def build(load: float, duration_s: float) -> Workload:
        issuer = Issuer(count(), ttft_target_s=_TTFT_S, output_max=4096)
        return Sessions(name, issuer, shape, rate=rate * load, horizon_s=duration_s)

    return build


def _rollouts(name: str, in_flight: int) -> Callable[[float, float], Workload]:
    def build(load: float, duration_s: float) -> Workload:
        issuer = Issuer(count(), ttft_target_s=_TTFT_JOB_S, output_max=65_536)
        return RolloutGroups(name, issuer, _ROLLOUTS, in_flight=round(in_flight * load), horizon_s=duration_s)

    return build


def _extraction(load: float, duration_s: float) -> Workload:
    issuer = Issuer(count(), ttft_target_s=_TTFT_JOB_S, output_max=256)
    return Extraction("extraction", issuer, _JOBS, rate=66.0 * load, horizon_s=duration_s)


def _no_reuse(load: float, duration_s: float) -> Workload:
    return Singles(
        "no_reuse",
        Issuer(count(), ttft_target_s=_TTFT_S, output_max=2048),
        rate=16.0 * load,
        horizon_s=duration_s,
        own_tokens=Skewed(1200, 0.9, 16_000),
        output_tokens=Skewed(180, 0.8, 2000),
    )


def _giant_prefix(load: float, duration_s: float) -> Workload:
    return Singles(
        "giant_prefix",
        Issuer(count(), ttft_target_s=_TTFT_S, output_max=1024),
        rate=13.0 * load,
        horizon_s=duration_s,
        own_tokens=Skewed(250, 0.8, 3000),
        output_tokens=Skewed(150, 0.7, 1000),
        shared_tokens=20_000,
    )


# Requests a second: `large` sends as `small` does, twenty times as often.
_SMALL_RATE, _LARGE_FACTOR = 0.9, 20.0


def _mixed_tenants(name: str, large_factor: float) -> Callable[[float, float], Workload]:
    def build(load: float, duration_s: float) -> Workload:
        ids = count()

        def calls(tenant: str, rate: float, priority: Priority, ttft_target_s: float) -> Workload:
            return Singles(
                tenant,
                Issuer(ids, ttft_target_s=ttft_target_s, output_max=512, tenant=tenant, priority=priority),
                rate=rate * load,
                horizon_s=duration_s,
                own_tokens=Skewed(600, 0.8, 6000),
                output_tokens=Skewed(90, 0.7, 500),
                shared_tokens=900,
            )

        def talks(tenant: str, shape: SessionShape, rate: float, priority: Priority, ttft_target_s: float) -> Workload:
            issuer = Issuer(ids, ttft_target_s=ttft_target_s, output_max=4096, tenant=tenant, priority=priority)
            return Sessions(tenant, issuer, shape, rate=rate * load, horizon_s=duration_s)

        return Mixture(
            name,
            {
                "chat": talks("chat", _CHAT, 1.8, Priority.INTERACTIVE, _TTFT_CHAT_S),
                "coding": talks("coding", _CODING, 1.2, Priority.DEFAULT, _TTFT_S),
                "small": calls("small", _SMALL_RATE, Priority.DEFAULT, _TTFT_JOB_S),
                "large": calls("large", _SMALL_RATE * large_factor, Priority.DEFAULT, _TTFT_JOB_S),
                "nightly": calls("nightly", 6.0, Priority.BATCH, _TTFT_BATCH_S),
            },
        )

    return build


def _fleet(replicas: int, kv_tokens: int, timing: StepTiming = H200_GLM) -> FleetSettings:
    return FleetSettings(replicas=replicas, limits=EngineLimits(kv_capacity_tokens=kv_tokens), timing=timing)


# The ladders' machines: Qwen3-32B in BF16 on two H100. 64 GB of weights and 262 kB of KV a token at 6.7 TB/s; the peak prefill
# rate that llm-d measured. With 100 sequences of 8000 tokens a replica makes 1900 tokens/s; they published 1860.
_LADDER_TIMING = StepTiming(base_s=0.0106, prefill_tokens_per_s=16_000.0, per_sequence_s=1e-4, per_context_token_s=4e-8)
_LADDER_FLEET = _fleet(8, 307_328, _LADDER_TIMING)
_FLEET = _fleet(8, _KV)
_SLO = Slo(itl_target_s=0.1)

_ALL = (
    Scenario(
        "ladder_73",
        "150 system prompts x 5 users, 73 % of the fleet's KV, a ladder of rates (3 to 60 requests/s at load 3.33)",
        _LADDER_FLEET,
        _SLO,
        160.0,
        _ladder("ladder_73", _GROUPS_73, _RATES_73),
    ),
    Scenario(
        "ladder_37",
        "83 system prompts x 3 users, 37 % of the fleet's KV, a ladder of rates (3 to 20 requests/s at load 2.22)",
        _fleet(4, 461_376, _LADDER_TIMING),
        _SLO,
        180.0,
        _ladder("ladder_37", _GROUPS_37, _RATES_37),
    ),
    Scenario(
        "ladder_146",
        "as ladder_73 with twice the system prompts: they take 146 % of the fleet's KV",
        _LADDER_FLEET,
        _SLO,
        160.0,
        _ladder("ladder_146", _GROUPS_146, _RATES_146),
    ),
    Scenario(
        "agents",
        "coding sessions of many turns with growing context and tool calls between; clients send a session id",
        _FLEET,
        Slo(itl_target_s=0.06),
        90.0,
        _agents("agents", _CODING, 5.0),
    ),
    Scenario(
        "agents_anonymous",
        "as agents, and no client sends a session id",
        _FLEET,
        Slo(itl_target_s=0.06),
        90.0,
        _agents("agents_anonymous", _CODING_ANONYMOUS, 5.0),
    ),
    Scenario(
        "agents_reasoning",
        "as agents, with a reasoning model whose template drops the reasoning of earlier turns",
        _FLEET,
        Slo(itl_target_s=0.06),
        90.0,
        _agents("agents_reasoning", _CODING_REASONING, 5.0),
    ),
    Scenario(
        "agents_crowded",
        "as agents_anonymous, on replicas whose KV holds only a part of the open sessions",
        _fleet(8, _SMALL_KV),
        Slo(itl_target_s=0.06),
        90.0,
        _agents("agents_crowded", _CODING_ANONYMOUS, 2.5),
    ),
    Scenario(
        "rl_groups",
        "groups of 16 identical prompts within 100 ms, answers of up to 65 536 tokens, a constant number in flight",
        _fleet(4, _KV),
        Slo(itl_target_s=0.15),
        120.0,
        _rollouts("rl_groups", 384),
        grace_s=2000.0,  # the longest answers take so long
    ),
    Scenario(
        "extraction",
        "24 jobs at a time, each with its own instructions before many documents; short answers at a high rate",
        _fleet(4, 131_072),
        _SLO,
        60.0,
        _extraction,
    ),
    Scenario("no_reuse", "control: no two prompts have anything in common", _fleet(4, _KV), _SLO, 90.0, _no_reuse),
    Scenario(
        "giant_prefix",
        "control: one prefix of 20 000 tokens before all prompts",
        _fleet(4, _KV),
        _SLO,
        90.0,
        _giant_prefix,
    ),
    Scenario(
        "mixed_tenants",
        "chat, coding agents and single calls of five tenants in three priorities; `large` sends 20 times what `small` does",
        _fleet(4, _KV),
        _SLO,
        90.0,
        _mixed_tenants("mixed_tenants", _LARGE_FACTOR),
    ),
    Scenario(
        "mixed_tenants_calm",
        "as mixed_tenants, but `large` sends no more than `small`: what the others get when nobody crowds them",
        _fleet(4, _KV),
        _SLO,
        90.0,
        _mixed_tenants("mixed_tenants_calm", 1.0),
    ),
)
SCENARIOS: Mapping[str, Scenario] = {scenario.name: scenario for scenario in _ALL}
# Where it matters that a prompt meets its prefix; the others are controls.
WITH_REUSE = (
    *("ladder_73", "ladder_37", "ladder_146", "agents", "agents_anonymous", "agents_reasoning", "agents_crowded"),
    *("rl_groups", "extraction", "mixed_tenants"),
)
