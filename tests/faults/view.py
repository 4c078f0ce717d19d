"""What a client saw of one answer, and whether it could tell a whole answer from a part of one."""

import json
from dataclasses import dataclass
from typing import Any

import httpx

_DONE = "[DONE]"


@dataclass(frozen=True, slots=True)
class View:
    status: int
    headers: httpx.Headers
    raw: bytes
    is_broken: bool  # the connection ended before the HTTP message did

    @property
    def json(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(self.raw)
        return value

    @property
    def events(self) -> list[str]:
        """The data of each event, comments left out. What is no whole event is a failure."""
        assert self.raw.endswith(b"\n\n") or not self.raw, f"half an event at the end: {self.raw[-200:]!r}"
        blocks = [block for block in self.raw.decode().split("\n\n") if block]
        assert all(block.startswith(("data: ", ":")) for block in blocks), blocks
        return [block.removeprefix("data: ") for block in blocks if not block.startswith(":")]

    @property
    def comments(self) -> int:
        return sum(block.startswith(b":") for block in self.raw.split(b"\n\n"))

    @property
    def done(self) -> int:
        """How often the stream said that it is whole."""
        return self.events.count(_DONE)

    @property
    def chunks(self) -> list[dict[str, Any]]:
        """The events that are part of the answer, in their order."""
        return [chunk for chunk in self._objects if not chunk.get("error")]

    @property
    def errors(self) -> list[dict[str, Any]]:
        """The error objects of the stream's error events."""
        return [chunk["error"] for chunk in self._objects if chunk.get("error")]

    @property
    def _objects(self) -> list[dict[str, Any]]:
        return [json.loads(event) for event in self.events if event != _DONE]

    @property
    def choices(self) -> list[dict[str, Any]]:
        return [choice for chunk in self.chunks for choice in chunk["choices"]]

    @property
    def text(self) -> str:
        """Of choice 0 of a stream, or of a whole answer."""
        if self.is_stream:
            return "".join(_text(choice.get("delta", choice)) for choice in self.choices if choice["index"] == 0)
        choice = self.json["choices"][0]
        return _text(choice.get("message", choice))

    @property
    def roles(self) -> int:
        return sum("role" in choice.get("delta", {}) for choice in self.choices)

    @property
    def finishes(self) -> list[str]:
        return [choice["finish_reason"] for choice in self.choices if choice["finish_reason"] is not None]

    @property
    def usages(self) -> list[dict[str, Any]]:
        """Every usage that the client was told; it pays each of them."""
        parts = self.chunks if self.is_stream else [self.json]
        return [part["usage"] for part in parts if part.get("usage")]

    @property
    def seams(self) -> list[int]:
        """How many continuations each chunk speaks of that speaks of any."""
        return [chunk["intellect"]["continuations"] for chunk in self.chunks if "intellect" in chunk]

    @property
    def is_stream(self) -> bool:
        content_type: str = self.headers.get("content-type", "")
        return content_type.startswith("text/event-stream")

    @property
    def error(self) -> dict[str, Any]:
        """The error object of an error answer."""
        value: dict[str, Any] = self.json["error"]
        return value


def _text(part: dict[str, Any]) -> str:
    return part.get("content") or part.get("text") or ""


def assert_whole(view: View, text: str) -> None:
    """The one good ending: status 200, this text once, one finish, one usage at most, [DONE] once and last, nothing broken."""
    assert view.status == 200, (view.status, view.raw[:500])
    assert not view.is_broken, view.raw[-500:]
    assert view.text == text
    if view.is_stream:
        assert view.errors == []
        assert (view.done, view.events[-1]) == (1, _DONE)
        assert len(view.finishes) == 1
        assert len({(chunk["id"], chunk["created"]) for chunk in view.chunks}) == 1
    assert len(view.usages) <= 1


def assert_cut(view: View, text: str, code: str = "upstream_error") -> None:
    """The one honest ending of a stream that could not be finished: a part of the text, one error event, a cut."""
    assert view.status == 200
    assert view.is_broken, "a part of an answer ended like a whole one"
    assert view.done == 0
    assert text.startswith(view.text), "text that the whole answer does not have"
    assert len(view.errors) == 1
    error = view.errors[0]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["param"], error["code"]) == ("server_error", None, code)
    assert json.loads(view.events[-1])["error"] == error, "nothing follows the error"


def assert_refused(view: View, status: int, code: str | None) -> None:
    """An HTTP error in OpenAI's shape."""
    assert (view.status, view.is_broken) == (status, False), view.raw[:500]
    assert set(view.error) == {"message", "type", "param", "code"}
    assert (view.error["type"], view.error["code"]) == ("rate_limit_error" if status == 429 else "server_error", code)
    assert "127.0.0.1" not in view.error["message"], "where engines live is nobody's business"
    if status in (429, 503):
        assert 1 <= int(view.headers["retry-after"]) <= 60
