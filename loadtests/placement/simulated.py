"""Scripts on virtual time: the simulator's fleet serves the very prompts that are sent to servers."""

import math
from collections.abc import Iterable, Sequence
from random import Random

from loadtests.placement.scripts import Script
from router.policy.catalogue import PolicyName, make_policy
from router.sim.cluster import simulate
from router.sim.fleet import FleetSettings
from router.sim.late_binding import LateBindingGateway
from router.sim.prompts import BLOCK_TOKENS, SimPrompt
from router.sim.request import SimRequest
from router.sim.result import Result

_MODEL = "sim"


class ScriptedWorkload:
    """Plays each script to its end, however long that takes. For one run."""

    name = "scripts"
    horizon_s = math.inf

    def __init__(self, scripts: Sequence[Script], *, bytes_per_token: float, kv_block_tokens: int, salt: int = 0) -> None:
        """`kv_block_tokens`: of the engines; a multiple of the 16 in which prompts are hashed.

        Another `salt` hashes prompts and sessions otherwise, so that a policy of hashes puts them elsewhere. Raises ValueError.
        """
        if kv_block_tokens % BLOCK_TOKENS:
            raise ValueError(f"kv_block_tokens is {kv_block_tokens}, but must be a multiple of {BLOCK_TOKENS}")
        self._scripts = {script.id: script for script in scripts}
        self._empty = SimPrompt.empty(bytes_per_token, salt)
        self._salt = salt
        self._stride = kv_block_tokens // BLOCK_TOKENS
        self._prompts: dict[str, SimPrompt] = {}  # with the last answer
        self._count = 0

    def initial(self, rng: Random) -> Iterable[SimRequest]:
        for script in self._scripts.values():
            yield self._request(script, 0, script.at)

    def follow_up(self, request: SimRequest, now: float, rng: Random) -> Sequence[SimRequest]:
        script = self._scripts[request.session]
        turn = request.turn + 1
        if turn == len(script.turns):
            return ()
        return (self._request(script, turn, now + script.turns[turn].pause_s),)

    def _request(self, script: Script, number: int, at: float) -> SimRequest:
        turn = script.turns[number]
        prompt = self._prompts.get(script.id, self._empty).extended(*turn.segments)
        answered = self._prompts[script.id] = prompt.extended(turn.answer)
        blocks, all_blocks = self._whole(prompt), self._whole(answered)
        self._count += 1
        return SimRequest(
            self._count,
            arrives_at=at,
            model=_MODEL,
            prompt=prompt,
            prompt_tokens=prompt.tokens,
            output_tokens=turn.answer.tokens,
            blocks=blocks,
            answer_blocks=all_blocks[len(blocks) :],
            session=script.id,
            turn=number,
            affinity=f"{script.id}-{self._salt}" if script.tells_session else None,
            output_max=turn.answer.tokens,
        )

    def _whole(self, prompt: SimPrompt) -> Sequence[int]:
        """Hashes of its whole KV blocks: hashes are chained, so a large block's is that of the last small one in it."""
        return prompt.blocks[self._stride - 1 :: self._stride]


def run_simulated(
    scripts: Sequence[Script], fleet: FleetSettings, policy: PolicyName, *, bytes_per_token: float, seed: int
) -> Result:
    """Our own router with `policy` before `fleet`. Only the policy is random: `seed` decides over its draws and hashes."""
    workload = ScriptedWorkload(
        scripts, bytes_per_token=bytes_per_token, kv_block_tokens=fleet.limits.kv_block_tokens, salt=seed
    )
    gateway = LateBindingGateway(make_policy(policy, Random(f"{seed} {policy}")))
    return simulate(fleet, workload, [gateway], seed=seed)
