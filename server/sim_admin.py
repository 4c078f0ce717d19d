"""vLLM's development routes on the simulated engine, and /sim/faults. The guard lets in only who has the engine's token."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from server.sim_asgi import Request, Routes, respond, respond_json
from server.sim_errors import ApiError
from server.sim_faults import Fault, FaultBook, FaultKind, decode_faults
from server.sim_loop import PauseMode, SimulatedEngine
from server.sim_settings import EngineSettings, KvEventSettings
from server.sim_weights import WeightsError

_TRUE = frozenset({"true", "1", "yes", "on", "t", "y"})
_FALSE = frozenset({"false", "0", "no", "off", "f", "n"})


class AdminRoutes:
    """`refuse` makes the port refuse connections for some seconds; it returns at once."""

    def __init__(
        self, *, settings: EngineSettings, engine: SimulatedEngine, faults: FaultBook, refuse: Callable[[float], None]
    ) -> None:
        self._settings = settings
        self._engine = engine
        self._faults = faults
        self._refuse = refuse

    def table(self) -> Routes:
        return {
            "/pause": {"POST": self._pause},
            "/resume": {"POST": self._resume},
            "/is_paused": {"GET": self._is_paused},
            "/is_sleeping": {"GET": self._is_sleeping},
            "/abort_requests": {"POST": self._abort_requests},
            "/collective_rpc": {"POST": self._collective_rpc},
            "/reset_prefix_cache": {"POST": self._reset_prefix_cache},
            "/reset_mm_cache": {"POST": self._reset_nothing},
            "/reset_encoder_cache": {"POST": self._reset_nothing},
            "/update_weight_version": {"POST": self._update_weight_version},
            "/weight_info": {"GET": self._weight_info},
            "/kv_event_sources": {"GET": self._kv_event_sources},
            "/server_info": {"GET": self._server_info},
            "/sim/faults": {"GET": self._list_faults, "POST": self._add_faults, "DELETE": self._clear_faults},
        }

    async def _pause(self, request: Request) -> None:
        raw = request.query.get("mode", PauseMode.ABORT.value)
        try:
            mode = PauseMode(raw)
        except ValueError as error:
            message = "Input should be 'abort', 'wait' or 'keep'"
            raise ApiError.invalid_body("literal_error", "query.mode", message, raw) from error
        await self._engine.pause(mode, clear_cache=_flag(request, "clear_cache", default=True))
        await respond_json(request.send, {"status": "paused"})

    async def _resume(self, request: Request) -> None:
        await self._engine.resume()
        await respond_json(request.send, {"status": "resumed"})

    async def _is_sleeping(self, request: Request) -> None:
        await self._engine.until_not_hung()
        await respond_json(request.send, {"is_sleeping": False})

    async def _is_paused(self, request: Request) -> None:
        await self._engine.until_not_hung()  # as in vLLM, the process that computes answers this
        await respond_json(request.send, {"is_paused": self._engine.is_paused})

    async def _abort_requests(self, request: Request) -> None:
        """Ids are those of the answers (`chatcmpl-...`); none means everything in flight."""
        wanted = (await request.read_admin_body()).get("request_ids")
        aborted = self._engine.abort_answers(wanted) if wanted else self._engine.abort_all()
        await respond_json(request.send, {"status": "aborted", "aborted": aborted})

    async def _collective_rpc(self, request: Request) -> None:
        body = await request.read_admin_body()
        method, kwargs = body.get("method"), body.get("kwargs") or {}
        if method is None:
            raise ApiError.http(400, "Missing 'method' in request body")
        if method not in ("reload_weights", "load_checkpoint"):  # the second is server.vllm_worker's
            raise _worker_error(f"'SimulatedWorker' object has no attribute '{method}'")
        if self._faults.reload_fails():
            raise _worker_error("scripted fault: reload_weights fails")
        folder = kwargs.get("weights_path", self._settings.model)
        if folder is None:
            raise _worker_error("reload_weights needs weights_path: the engine was started without --model")
        try:
            await self._engine.reload_weights(Path(folder))
        except (WeightsError, TypeError) as error:
            raise _worker_error(str(error)) from error
        await respond_json(request.send, {"results": [None]})

    async def _reset_prefix_cache(self, request: Request) -> None:
        preempts = _flag(request, "reset_running_requests", default=False)
        await respond_json(request.send, {"success": await self._engine.reset_prefix_cache(preempt_running=preempts)})

    async def _reset_nothing(self, request: Request) -> None:
        """Caches that a text engine does not have."""
        await respond(request.send, b"", content_type=None)

    async def _update_weight_version(self, request: Request) -> None:
        version = (await request.read_admin_body()).get("new_version")
        if not isinstance(version, str):
            kind, message = (
                ("missing", "Field required") if version is None else ("string_type", "Input should be a valid string")
            )
            raise ApiError.invalid_body(kind, "body.new_version", message, version)
        self._engine.weight_version = version
        await respond_json(request.send, {"success": True, "new_version": version})

    async def _weight_info(self, request: Request) -> None:
        await respond_json(request.send, {"weight_version": self._engine.weight_version})

    async def _kv_event_sources(self, request: Request) -> None:
        config = self._settings.kv_events
        await respond_json(request.send, {} if config is None else {"0": _kv_events_config(config)})

    async def _server_info(self, request: Request) -> None:
        info = {"vllm_config": repr(self._settings_shown()), "vllm_env": {}, "system_env": {}}
        await respond_json(request.send, info)

    async def _list_faults(self, request: Request) -> None:
        await respond_json(request.send, {"faults": self._faults.listing()})

    async def _add_faults(self, request: Request) -> None:
        try:
            faults = decode_faults(await request.read())
        except ValueError as error:
            raise ApiError.bad_value(str(error)) from error
        if any(fault.kind is FaultKind.SLOW_START for fault in faults):
            raise ApiError.bad_value("slow_start only works at launch: pass it as --fault")
        self._faults.add([fault for fault in faults if fault.kind is not FaultKind.REFUSE])
        await respond_json(request.send, {"faults": self._faults.listing()})
        self._start_refusing(faults)

    async def _clear_faults(self, request: Request) -> None:
        self._faults.clear()
        self._engine.recover()
        await respond_json(request.send, {"faults": []})

    def _start_refusing(self, faults: list[Fault]) -> None:
        seconds = max((fault.seconds for fault in faults if fault.kind is FaultKind.REFUSE), default=0.0)
        if seconds:
            self._refuse(seconds)

    def _settings_shown(self) -> dict[str, object]:
        settings = self._settings
        return {"scheduler": settings.scheduler, "timing": settings.timing, "model": settings.model}


def _worker_error(reason: str) -> ApiError:
    """How vLLM words an exception inside a worker's method."""
    return ApiError.internal(
        f"Call to collective_rpc method failed: Worker failed with error '{reason}', please check the stack trace above "
        "for the root cause"
    )


def _flag(request: Request, name: str, *, default: bool) -> bool:
    raw = request.query.get(name)
    if raw is None:
        return default
    if raw.lower() not in _TRUE | _FALSE:
        message = "Input should be a valid boolean, unable to interpret input"
        raise ApiError.invalid_body("bool_parsing", f"query.{name}", message, raw)
    return raw.lower() in _TRUE


def _kv_events_config(config: KvEventSettings) -> dict[str, Any]:
    return {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": config.endpoint,
        "replay_endpoint": config.replay_endpoint,
        "buffer_steps": config.buffer_steps,
        "hwm": config.hwm,
        "max_queue_size": config.max_queue_size,
        "topic": config.topic,
    }
