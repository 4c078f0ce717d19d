"""What the clients' tests know of the service that they talk to."""

from dataclasses import dataclass
from typing import Any

from tests.router.process import RouterProcess
from tests.sim import SimEngine
from tests.waiting import wait_until

MODEL = "org/sim"
EMBEDDING_MODEL = "org/sim-embedding"
KEY = "sk-clients"
MAX_BODY_BYTES = 1_000_000
CONTEXT_TOKENS = 8192
QUESTION = "How far is the moon?"


@dataclass(frozen=True, slots=True)
class Service:
    """One router with a key in front of an engine and one that only embeds."""

    router: RouterProcess
    engine: SimEngine

    def fail_next(self, status: int, times: int = 1) -> None:
        """The engine refuses that many requests from now on."""
        self.engine.add_faults({"kind": "status", "status": status, "times": times})

    def break_next(self, kind: str, after_chunks: int) -> None:
        """The next answer breaks after that many events."""
        self.engine.add_faults({"kind": kind, "after_chunks": after_chunks, "times": 1})

    def delay_next(self, seconds: float) -> None:
        self.engine.add_faults({"kind": "delay", "seconds": seconds, "times": 1})

    def await_idle(self) -> None:
        """Waits, at most a second, until neither the engine nor the router works on anything."""

        def is_idle() -> bool:
            running = self.engine.metric("vllm:num_requests_running") + self.engine.metric("vllm:num_requests_waiting")
            return running == 0 and self.router.in_flight() == 0

        wait_until(is_idle, 1, "the engine and the router to be idle")


def weather_tool() -> dict[str, Any]:
    """A function tool in OpenAI's form."""
    parameters = {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1, "maximum": 7}},
        "required": ["city", "days"],
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": "forecast", "description": "The weather.", "parameters": parameters}}
