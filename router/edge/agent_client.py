"""What the router asks of a replica's agent or of a bare engine outside the hot path: status, models, swaps."""

import httpx
import msgspec

from protocol.errors import ErrorBody
from protocol.status import ReplicaState, ReplicaStatus, SwapReport
from router.types import Endpoint, Health, Observation

_HEALTH_OF_STATE = {
    ReplicaState.STARTING: Health.STARTING,
    ReplicaState.READY: Health.READY,
    ReplicaState.DRAINING: Health.DRAINING,
    ReplicaState.SWAPPING: Health.SWAPPING,
    ReplicaState.FAILED: Health.DOWN,
}

# Verifying and loading a checkpoint of hundreds of GB from a shared disk takes this long at worst.
SWAP_TIMEOUT_S = 1800.0


class ControlError(Exception):
    """An agent or engine did not do what was asked; the message says why."""


class ControlRefused(ControlError):
    """Nobody listens, or the connection was reset."""


class ControlTimeout(ControlError):
    """It listens but did not answer in time."""


class _ModelCard(msgspec.Struct, frozen=True):
    id: str


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
        response = await self._request("GET", f"{url}/status", timeout_s, headers=self._agent_headers)
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
        self, method: str, url: str, timeout_s: float, *, headers: dict[str, str], json: object = None
    ) -> httpx.Response:
        try:
            return await self._http.request(method, url, timeout=timeout_s, headers=headers, json=json)
        except httpx.TimeoutException as error:
            raise ControlTimeout(f"{url} did not answer within {timeout_s:g} s") from error
        except httpx.HTTPError as error:
            raise ControlRefused(f"{url}: {error or type(error).__name__}") from error


def observation_of(status: ReplicaStatus, engine: Endpoint) -> Observation:
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
