"""One replica: an engine under supervision, the weights it serves, and at most one swap of them at a time.

Single owner of that state, on one event loop. Reached through `agent_api`, run by `agent`.
"""

import asyncio
import logging
import random
import secrets
from collections.abc import Callable, Mapping, Sequence

from protocol.manifest import CheckpointError
from protocol.status import BASE_VERSION, ReplicaState, ReplicaStatus, SwapOutcome, SwapReport
from server.checkpoint_check import SwapRefused, base_layout, verify_version
from server.engine_client import EngineClient, EngineError, EngineFacts, engine_url
from server.metrics import AgentMetrics
from server.presets import API_KEY_VARIABLE, EngineStart, LaunchPlan, plan_launch
from server.settings import AgentSettings
from server.supervisor import EnginePhase, LaunchRefused, Supervisor
from server.swap import Served, swap

_LOG_LEVELS = {
    SwapOutcome.SWAPPED: logging.INFO,
    SwapOutcome.REFUSED: logging.WARNING,  # nothing happened to what is served
    SwapOutcome.RESTORED: logging.ERROR,
    SwapOutcome.FAILED: logging.ERROR,
}

logger = logging.getLogger(__name__)


class NotNow(Exception):
    """The replica cannot begin a swap at present: another one is running, or the engine is not ready."""


def replica_state(phase: EnginePhase, *, draining: bool, swapping: bool) -> ReplicaState:
    """A draining replica that swaps is draining: it takes nothing new. That it is paused too is ReplicaStatus.paused."""
    if phase is EnginePhase.FAILED:
        return ReplicaState.FAILED
    if phase is EnginePhase.STARTING:
        return ReplicaState.STARTING
    if phase is EnginePhase.STOPPED or draining:
        return ReplicaState.DRAINING
    return ReplicaState.SWAPPING if swapping else ReplicaState.READY


class Replica:
    def __init__(
        self,
        settings: AgentSettings,
        *,
        metrics: AgentMetrics,
        environ: Mapping[str, str],
        cores: Sequence[int],
        clock: Callable[[], float],
        rng: random.Random,
    ) -> None:
        self._settings = settings
        self._metrics = metrics
        self._environ = environ
        self._cores = cores
        self._clock = clock
        self._served = Served(version=BASE_VERSION, epoch=0, weights=settings.model or "")
        self._draining = False
        self._client: EngineClient | None = None
        self._plan: LaunchPlan | None = None
        self._facts = EngineFacts()
        self._swap: asyncio.Task[SwapReport] | None = None
        self._swapping_to: str | None = None  # from the moment the swap touches the engine
        self._supervisor = Supervisor(
            make_plan=self._next_plan,
            probe=self._answers,
            may_be_silent=self._is_paused,
            on_ready=self._learn_facts,
            policy=settings.restart,
            clock=clock,
            rng=rng,
        )

    async def run(self) -> None:
        """Returns after `stop`, with the engine gone."""
        try:
            await self._supervisor.run()
        finally:
            if self._swap is not None:
                self._swap.cancel()
                await asyncio.gather(self._swap, return_exceptions=True)
            await self._close_client()

    def stop(self) -> None:
        self._draining = True
        self._supervisor.stop()

    def drain(self, draining: bool) -> None:
        self._draining = draining

    @property
    def engine_up(self) -> bool:
        return self._supervisor.phase is EnginePhase.RUNNING

    def status(self, host: str) -> ReplicaStatus:
        """`host` is where the reader reaches this machine."""
        phase = self._supervisor.phase
        state = replica_state(phase, draining=self._draining, swapping=self._is_paused())
        plan = self._plan
        place = self._settings.expert_parallel
        facts = self._facts if phase is EnginePhase.RUNNING else EngineFacts()
        return ReplicaStatus(
            state=state,
            engine_url=engine_url(host, self._settings.port),
            model=self._settings.served_model_name,
            checkpoint=self._served.version,
            epoch=self._served.epoch,
            reason=self._reason(state),
            paused=phase is EnginePhase.RUNNING and self._is_paused(),
            max_model_len=facts.max_model_len,
            kv_capacity_tokens=facts.kv_capacity_tokens,
            kv_block_size=facts.kv_block_size,
            expert_parallel_group=place.group if place else None,
            expert_parallel_rank=place.rank if place else None,
            kv_events_endpoint=f"tcp://{host}:{plan.kv_events_port}" if plan and plan.kv_events_port else None,
            engine_pid=self._supervisor.pid,
            engine_restarts=self._supervisor.restarts,
        )

    async def swap(self, version: str) -> SwapReport:
        """Swaps to a published version, or back to `base`. Raises NotNow.

        The swap belongs to the replica: it goes on to its end when the caller is cancelled.
        """
        if self._swap is not None and not self._swap.done():
            raise NotNow("another checkpoint swap is running; ask again when it has ended")
        if self._client is None or self._supervisor.phase is not EnginePhase.RUNNING:
            raise NotNow(f"the engine is not ready: {self._supervisor.reason}")
        self._swap = asyncio.create_task(self._run_swap(version, self._client), name=f"swap to {version}")
        return await asyncio.shield(self._swap)

    async def _run_swap(self, version: str, client: EngineClient) -> SwapReport:
        run = self._supervisor.starts
        target = self._target(version)

        async def check() -> None:
            await self._check_target(version)
            if self._supervisor.starts != run or self._supervisor.phase is not EnginePhase.RUNNING:
                raise SwapRefused("engine_restarted", "the engine was restarted while the checkpoint was verified; ask again")
            self._swapping_to = version

        known = False
        try:
            report = await swap(
                client,
                former=self._served,
                target=target,
                verify=check,
                deadlines=self._settings.swap,
                clock=self._clock,
            )
            known = report.outcome is not SwapOutcome.FAILED
            if report.outcome is SwapOutcome.SWAPPED:
                self._served = target
        finally:
            # What goes wrong before the engine is touched leaves it as it was.
            has_touched, self._swapping_to = self._is_paused(), None
            if has_touched and not known:
                self._supervisor.restart(run, f"the swap to {version} left the engine in an unknown state")
        self._metrics.swap_ended(report)
        level = _LOG_LEVELS[report.outcome]
        logger.log(level, "swap to %s: %s in %.2f s. %s", version, report.outcome, report.seconds, report.reason or "")
        return report

    def _target(self, version: str) -> Served:
        settings = self._settings
        epoch = self._served.epoch + 1
        if version == BASE_VERSION or settings.store is None:
            return Served(version=version, epoch=epoch, weights=settings.model or "")
        # Not read before `verify` has checked that the version is a plain name.
        folder = settings.store.absolute() / settings.served_model_name / version
        return Served(version=version, epoch=epoch, weights=str(folder))

    async def _check_target(self, version: str) -> None:
        """Raises CheckpointError or SwapRefused unless the version may be loaded over what is served."""
        settings = self._settings
        base = await asyncio.to_thread(base_layout, settings.model)
        if version == BASE_VERSION:
            return
        await asyncio.to_thread(verify_version, settings.store, settings.served_model_name, version, base)

    async def _next_plan(self) -> LaunchPlan:
        """The engine is started on the weights that it served last, so it never answers with others, not even briefly."""
        if self._swap is not None and self._swapping_to is not None:
            # It was under way when the engine died, so it fails now; only then is it settled what is served.
            await asyncio.wait({self._swap})
        served = self._served
        if served.version != BASE_VERSION:
            try:
                await asyncio.to_thread(verify_version, self._settings.store, self._settings.served_model_name, served.version)
            except (CheckpointError, SwapRefused) as error:
                raise LaunchRefused(f"{served.version}, which was served before, cannot be loaded again: {error}") from error
            except Exception as error:
                logger.exception("verifying %s failed in a way that nobody foresaw", served.version)
                raise LaunchRefused(
                    f"{served.version}, which was served before, cannot be loaded again: {type(error).__name__}: {error}"
                ) from error
        if self._plan is not None:
            self._metrics.engine_restarted()
        start = EngineStart(
            model=served.weights or None,
            base=None if served.version == BASE_VERSION else self._settings.model,
            label=served.label,
            token=secrets.token_urlsafe(32),
        )
        plan = plan_launch(self._settings, start, environ=self._environ, cores=self._cores)
        await self._close_client()
        url = engine_url(self._settings.host, self._settings.port)
        self._client = EngineClient(url, start.token, api_key=plan.env.get(API_KEY_VARIABLE))
        self._plan = plan
        return plan

    async def _close_client(self) -> None:
        if self._client is not None:
            client, self._client = self._client, None
            await client.aclose()

    def _is_paused(self) -> bool:
        return self._swapping_to is not None

    async def _answers(self, timeout_s: float) -> bool:
        return self._client is not None and await self._client.answers(timeout_s)

    async def _learn_facts(self) -> None:
        assert self._client is not None
        try:
            self._facts = await self._client.facts()
        except EngineError as error:
            self._facts = EngineFacts()
            logger.warning("the engine does not say how large its KV cache is: %s", error)

    def _reason(self, state: ReplicaState) -> str | None:
        match state:
            case ReplicaState.READY:
                return None
            case ReplicaState.SWAPPING:
                return f"swapping to {self._swapping_to}"
            case ReplicaState.DRAINING:
                return self._supervisor.reason or "takes nothing new: drain was asked for"
            case _:
                return self._supervisor.reason
