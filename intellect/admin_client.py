"""The router's admin API, as far as the command line uses it: starting a rollout and following it."""

import time
from collections.abc import Iterator
from typing import Self

import httpx
import msgspec

from intellect.problem import Problem, UsageProblem
from protocol.status import SwapOutcome

_REQUEST_TIMEOUT_S = 10.0
_POLL_S = 0.2
# The rollout runs in the router; a router that does not answer for this long is taken for gone.
_SILENCE_S_MAX = 30.0


class ReplicaReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one replica did. `version` and `epoch` are what it serves afterwards."""

    replica: str
    outcome: SwapOutcome
    seconds: float
    version: str
    epoch: int
    phases: dict[str, float] = {}  # seconds
    reason: str | None = None


class RolloutView(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of GET /admin/rollouts/{id}."""

    id: str
    model: str
    version: str
    strategy: str
    state: str  # running, done, failed
    seconds: float
    reason: str | None = None
    replicas: tuple[ReplicaReport, ...] = ()


class AdminClient:
    """Speaks to one router. Every failure is a Problem that names the address."""

    def __init__(self, base_url: str, token: str | None) -> None:
        if not base_url.startswith(("http://", "https://")):
            raise UsageProblem(f"--admin {base_url}: not an address; give http://HOST:PORT of the router's admin port")
        self._base_url = base_url.rstrip("/")
        headers = {} if token is None else {"authorization": f"Bearer {token}"}
        # trust_env off: an admin port is never behind a proxy that the environment names for the outside.
        self._http = httpx.Client(headers=headers, timeout=_REQUEST_TIMEOUT_S, trust_env=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._http.close()

    def start_rollout(self, model: str, version: str, strategy: str) -> RolloutView:
        body = {"model": model, "version": version, "strategy": strategy}
        return self._read(self._request("POST", "/admin/rollouts", body))

    def follow_rollout(self, rollout_id: str, *, timeout_s: float) -> Iterator[RolloutView]:
        """The rollout's state again and again; the last one is not running any more."""
        deadline = time.monotonic() + timeout_s
        heard = time.monotonic()
        while True:
            try:
                view = self._read(self._request("GET", f"/admin/rollouts/{rollout_id}", None))
                heard = time.monotonic()
                yield view
                if view.state != "running":
                    return
            except _Unreachable:
                if time.monotonic() - heard > _SILENCE_S_MAX:
                    raise
            if time.monotonic() > deadline:
                raise Problem(
                    f"rollout {rollout_id} is still running after {timeout_s:g} s; it goes on: "
                    f"see GET {self._base_url}/admin/rollouts/{rollout_id}"
                )
            time.sleep(_POLL_S)

    def _request(self, method: str, path: str, body: dict[str, str] | None) -> bytes:
        try:
            answer = self._http.request(method, self._base_url + path, json=body)
        except httpx.HTTPError as error:
            raise _Unreachable(
                f"--admin {self._base_url}: no answer ({error or type(error).__name__}); is the router running, "
                "and is this its admin port?"
            ) from error
        if answer.status_code == 401:
            raise Problem(f"--admin {self._base_url}: refused; give its token with --admin-token or INTELLECT_ADMIN_TOKEN")
        if answer.status_code == 404 and method == "POST":
            raise Problem(f"--admin {self._base_url}: no admin API there; give the router's admin port, 8001 by default")
        if answer.is_error:
            raise Problem(_error_message(answer))
        return answer.content

    def _read(self, content: bytes) -> RolloutView:
        try:
            return msgspec.json.decode(content, type=RolloutView)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Problem(f"--admin {self._base_url}: what answers there is not a router's admin API ({error})") from error


class _Unreachable(Problem):
    pass


def _error_message(answer: httpx.Response) -> str:
    try:
        message = answer.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = answer.text.strip()[:200] or "no reason given"
    return f"the router answered {answer.status_code}: {message}"
