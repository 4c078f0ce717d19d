"""Stored responses of the simulated engine: what GET and cancel of the Responses API answer from.

Like vLLM's store it is off unless VLLM_ENABLE_RESPONSES_API_STORE is set, and it forgets nothing.
"""

import asyncio
import itertools
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from server.guard import Send
from server.sim_asgi import SSE_HEADERS, Handler, Request, respond_json
from server.sim_errors import ApiError
from server.sim_responses_request import Messages
from server.sim_transport import connection_of

_PREFIX = "/v1/responses/"
_CANCEL = "/cancel"
_LAST_EVENT = b"event: response.completed\n"


class EventLog:
    """The events of a streamed response that runs in the background; any number of clients follow it."""

    def __init__(self) -> None:
        self._events: list[bytes] = []
        self._news = asyncio.Condition()

    async def append(self, events: Sequence[bytes]) -> None:
        async with self._news:
            self._events += events
            self._news.notify_all()

    async def next(self, index: int) -> bytes:
        """The event of this index, once it is there."""
        async with self._news:
            await self._news.wait_for(lambda: index < len(self._events))
        return self._events[index]


class ResponseStore:
    def __init__(self) -> None:
        self._responses: dict[str, dict[str, Any]] = {}
        self._messages: dict[str, Messages] = {}
        self._logs: dict[str, EventLog] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def recall(self, response_id: str) -> Messages:
        """The conversation up to and with a stored response.

        Raises:
            ApiError: there is no such response.
        """
        response = self._response(response_id)
        texts = [part["text"] for item in response["output"] if item["type"] == "message" for part in item["content"]]
        return [*self._messages[response_id], *({"role": "assistant", "content": text} for text in texts)]

    def keep_messages(self, response_id: str, messages: Messages) -> None:
        self._messages[response_id] = messages

    def keep(self, response: Mapping[str, Any]) -> None:
        """Stores a response, unless it was cancelled meanwhile."""
        stored = self._responses.get(response["id"])
        if stored is None or stored["status"] != "cancelled":
            self._responses[response["id"]] = dict(response)

    def run(self, response_id: str, task: asyncio.Task[None], log: EventLog | None) -> None:
        """Keeps the work of a background response; `log` is where its events go."""
        self._tasks[response_id] = task
        task.add_done_callback(lambda _: self._tasks.pop(response_id, None))
        if log is not None:
            self._logs[response_id] = log

    def handlers(self, path: str) -> dict[str, Handler] | None:
        """The methods of /v1/responses/{id} and /v1/responses/{id}/cancel; None for other paths."""
        rest = path.removeprefix(_PREFIX)
        response_id = rest.removesuffix(_CANCEL)
        if rest == path or not response_id or "/" in response_id:
            return None

        async def get(request: Request) -> None:
            await self._get(request, response_id)

        async def cancel(request: Request) -> None:
            await self._cancel(request, response_id)

        return {"GET": get} if rest == response_id else {"POST": cancel}

    async def _get(self, request: Request, response_id: str) -> None:
        query = request.query
        response = self._response(response_id)
        if query.get("stream", "false").lower() not in ("true", "1"):
            await respond_json(request.send, response)
            return
        log = self._logs.get(response_id)
        if log is None:
            # vLLM finds out when its stream has begun, and then breaks it.
            await request.send({"type": "http.response.start", "status": 200, "headers": list(SSE_HEADERS)})
            connection_of(request.scope).close()
            return
        after = query.get("starting_after")
        if after is not None and not after.isdecimal():
            message = "Input should be a valid integer, unable to parse string as an integer"
            raise ApiError.invalid_body("int_parsing", "query.starting_after", message, after)
        await _while_there(request, follow(request.send, log, 0 if after is None else int(after) + 1))

    async def _cancel(self, request: Request, response_id: str) -> None:
        response = self._response(response_id)
        if response["status"] not in ("queued", "in_progress"):
            message = "Cannot cancel a synchronous response."
            raise ApiError(400, "invalid_request_error", message, param="response_id")
        response["status"] = "cancelled"
        if (task := self._tasks.get(response_id)) is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await respond_json(request.send, response)

    def _response(self, response_id: str) -> dict[str, Any]:
        if (response := self._responses.get(response_id)) is None:
            raise ApiError.unknown_response(response_id)
        return response


async def follow(send: Send, log: EventLog, first: int = 0) -> None:
    """Sends a background response's events from the one numbered `first` on, until the last one.

    A cancelled response has no last event: as from vLLM, its followers wait until they leave.

    Raises:
        ConnectionBrokenByFault: a scripted fault broke the answer.
    """
    await send({"type": "http.response.start", "status": 200, "headers": list(SSE_HEADERS)})
    for number in itertools.count(first):
        data = await log.next(number)
        await send({"type": "http.response.body", "body": data, "more_body": True})
        if data.startswith(_LAST_EVENT):
            break
    await send({"type": "http.response.body", "body": b""})


async def _while_there(request: Request, work: Coroutine[None, None, None]) -> None:
    """Runs `work`, but no longer than the client stays."""
    gone, task = asyncio.create_task(request.until_gone()), asyncio.create_task(work)
    try:
        await asyncio.wait((gone, task), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
    finally:
        gone.cancel()
        task.cancel()
        await asyncio.gather(gone, task, return_exceptions=True)
