"""What the router asks of a replica's agent or of a bare engine outside the hot path: status, models, swaps."""

import asyncio

import httpx
import msgspec

from protocol.errors import ErrorBody
from protocol.manifest import CheckpointError, check_version_name
from protocol.status import ReplicaState, ReplicaStatus, SwapReport
from router.types import Endpoint, Health, Observation

_HEALTH_OF_STATE = {
    ReplicaState.STARTING: Health.STARTING,
    ReplicaState.READY: Health.READY,
    ReplicaState.DRAINING: Health.DRAINING,
    ReplicaState.SWAPPING: Health.SWAPPING,
    ReplicaState.FAILED: Health.DOWN,
}

# Longer than an agent's own deadlines for all phases of a swap and of the way back: whoever gives up first must be the agent.
SWAP_TIMEOUT_S = 3 * 3600.0
ANSWER_BYTES_MAX = 4 * 1024 * 1024


class ControlError(Exception):
    """An agent or engine did not do what was asked; the message says why."""


class ControlRefused(ControlError):
    """Nobody listens, or the connection was reset."""


class ControlTimeout(ControlError):
    """It listens but did not answer in time."""


class _ModelCard(msgspec.Struct, frozen=True):
    id: str


class _Paused(msgspec.Struct, frozen=True):
    is_paused: bool


class _ModelList(msgspec.Struct, frozen=True):
    data: tuple[_ModelCard, ...]


class ControlClient:
    """Requests to agents and engines of the fleet. Errors of the network and of decoding become ControlError."""

    def __init__(self, http: httpx.AsyncClient, *, agent_token: str | None, upstream_key: str | None) -> None:
        self._http = http
        self._agent_headers = {"authorization": f"Bearer {agent_token}"} if agent_token else {}
        self._engine_headers = {"authorization": f"Bearer {upstream_key}"} if upstream_key else {}

    async def agent_status(self, url: str, timeout_s: float) -> ReplicaStatus | None:
        """The agent's status, or None if what answers at `url` is not an agent."""
        response = await self._request("GET", f"{url}/status", timeout_s)
        if response.status_code != 200:
            return None
        try:
            return msgspec.json.decode(response.content, type=ReplicaStatus)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None

    async def engine_health(self, url: str, timeout_s: float) -> None:
        """Returns if the engine says that it is healthy. Raises ControlError."""
        response = await self._request("GET", f"{url}/health", timeout_s, headers=self._engine_headers)
        if response.status_code != 200:
            raise ControlRefused(f"{url}/health answered {response.status_code}")

    async def engine_models(self, url: str, timeout_s: float) -> tuple[str, ...]:
        response = await self._request("GET", f"{url}/v1/models", timeout_s, headers=self._engine_headers)
        if response.status_code == 401:
            raise ControlError(f"{url} wants a key: give --upstream-key (or INTELLECT_UPSTREAM_KEY)")
        if response.status_code != 200:
            raise ControlError(f"{url}/v1/models answered {response.status_code}")
        try:
            return tuple(card.id for card in msgspec.json.decode(response.content, type=_ModelList).data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ControlError(f"{url}/v1/models is not a list of models: {error}") from error

    async def engine_metrics(self, engine: Endpoint, timeout_s: float) -> bytes:
        """The engine's metrics as Prometheus text."""
        url = f"http://{engine}/metrics"
        response = await self._request("GET", url, timeout_s, headers=self._engine_headers)
        if response.status_code != 200:
            raise ControlError(f"{url} answered {response.status_code}")
        return response.content

    async def engine_is_paused(self, engine: Endpoint, timeout_s: float) -> bool:
        """Whether the engine says that it is paused; False where it does not say."""
        try:
            response = await self._request("GET", f"http://{engine}/is_paused", timeout_s, headers=self._engine_headers)
        except ControlError:
            return False
        try:
            return response.status_code == 200 and msgspec.json.decode(response.content, type=_Paused).is_paused
        except (msgspec.DecodeError, UnicodeDecodeError):
            return False

    async def swap(self, url: str, version: str) -> SwapReport:
        """Asks an agent to serve `version` and waits for it. Raises ControlError if it answers with anything but a report."""
        response = await self._request(
            "POST", f"{url}/checkpoint", SWAP_TIMEOUT_S, headers=self._agent_headers, json={"version": version}
        )
        try:
            return msgspec.json.decode(response.content, type=SwapReport)
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise ControlError(f"{url} answered {response.status_code}: {_message(response)}") from None

    async def _request(
        self, method: str, url: str, timeout_s: float, *, headers: dict[str, str] | None = None, json: object = None
    ) -> httpx.Response:
        """Within `timeout_s` in all and ANSWER_BYTES_MAX: what answers may be anything."""
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._http.stream(method, url, timeout=None, headers=headers, json=json) as response,
            ):
                body = bytearray()
                async for part in response.aiter_bytes():
                    body += part
                    if len(body) > ANSWER_BYTES_MAX:
                        raise ControlError(f"{url} answered with more than {ANSWER_BYTES_MAX} bytes")
                return httpx.Response(response.status_code, content=bytes(body))
        except TimeoutError as error:
            raise ControlTimeout(f"{url} did not answer within {timeout_s:g} s") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ControlRefused(f"{url}: {error or type(error).__name__}") from error


def observation_of(status: ReplicaStatus, engine: Endpoint) -> Observation:
    try:
        check_version_name(status.checkpoint)
    except CheckpointError as error:
        return Observation(Health.DOWN, f"its agent names an impossible version: {error}")
    health = _HEALTH_OF_STATE[status.state]
    return Observation(
        health=health,
        problem=None if health is Health.READY else status.reason or f"its agent says {status.state}",
        engine=engine,
        models=(status.model,),
        status=status,
    )


def _message(response: httpx.Response) -> str:
    try:
        return msgspec.json.decode(response.content, type=ErrorBody).error.message
    except (msgspec.DecodeError, UnicodeDecodeError):
        return response.text[:200]
