"""The router's settings: one TOML table `[router]`, overridden by INTELLECT_* variables, overridden by flags; read once."""

import difflib
import enum
import ipaddress
import math
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from router.policy.catalogue import PolicyName

ENVIRONMENT_PREFIX = "INTELLECT_"
_TOKEN = re.compile(r"[A-Za-z0-9._~+/=:-]+")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s]+")
_REPLICA_URL = re.compile(r"http://([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):(?P<port>[0-9]{1,5})/?")

# A database's number may stand in it, though messages are not kept in any.
_REDIS_URL = re.compile(
    r"(redis|(?P<tls>rediss))://([^@/?#\s]*@)?([A-Za-z0-9._-]+|\[(?P<ip>[0-9A-Fa-f:.]+)\])(:(?P<port>[0-9]{1,5}))?(/[0-9]*)?"
    r"(?(tls)(\?ssl_ca_certs=[^&#\s]+)?)"
    r"|unix://([^@/?#\s]*@)?/[^?#\s]+"
)
WORKERS_MAX = 256


class ConfigError(ValueError):
    """A setting that cannot be used. The message names the setting, its value and what to do."""


class ContinuationMode(enum.StrEnum):
    """What becomes of a stream whose replica fails in the middle."""

    OFF = "off"  # it ends with an error
    SAFE = "safe"  # another replica goes on with it where that gives the same answer


class ModelSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What differs for one model; None where it does not."""

    first_byte_timeout_s: float | None = None
    idle_timeout_s: float | None = None
    total_timeout_s: float | None = None


class RouterSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Defaults suit a laptop. docs/config.md describes each one."""

    host: str = "127.0.0.1"
    port: int = 8000
    admin_host: str = "127.0.0.1"
    admin_port: int = 8001
    replica: tuple[str, ...] = ()  # URLs of agents or engines
    replica_file: str | None = None  # one URL a line; read again when it changes
    policy: PolicyName = PolicyName.PREDICTED
    api_key: tuple[str, ...] = ()
    require_keys: bool = False
    allow_anonymous: bool = False
    admin_token: str | None = None
    agent_token: str | None = None
    upstream_key: str | None = None
    served_model_name: str | None = None
    cors_origin: tuple[str, ...] = ()
    health_interval_s: float = 1.0
    connect_timeout_s: float = 2.0
    first_byte_timeout_s: float = 600.0
    idle_timeout_s: float = 120.0
    total_timeout_s: float = 0.0  # 0: none
    model: dict[str, ModelSettings] = {}  # by the name that clients use
    keep_alive_s: float = 10.0
    stall_after_s: float = 3.0
    continuation: ContinuationMode = ContinuationMode.SAFE
    body_timeout_s: float = 60.0
    drain_timeout_s: float = 30.0
    max_body_bytes: int = 32 * 1024 * 1024
    max_attempts: int = 3
    debug_headers: bool = False
    kv_events: bool = True
    access_log: bool = True
    decision_log: str | None = None  # file of one JSON line for each request
    workers: int = 1
    redis: str | None = None
    redis_channel: str = "intellect:placements"  # one for each fleet


_LISTS = ("replica", "api_key", "cors_origin")
_TABLES = ("model",)
_BOOLEANS = ("require_keys", "allow_anonymous", "debug_headers", "kv_events", "access_log")


def load_settings(config_file: Path | None, environ: Mapping[str, str], overrides: Mapping[str, object]) -> RouterSettings:
    """Settings from a file, then the environment, then `overrides` (flags; None means not given).

    Raises ConfigError for an unreadable file, an unknown key, a value of the wrong type and a combination that is not safe.
    """
    values: dict[str, object] = {}
    if config_file is not None:
        values |= _typed(_read_table(config_file), lambda name: f"--config {config_file}: {name}", is_text=False)
    values |= _typed(_from_environment(environ), _variable, is_text=True)
    values |= _typed({name: value for name, value in overrides.items() if value is not None}, _flag, is_text=True)
    settings = RouterSettings(**values)  # type: ignore[arg-type]  # each value was converted to its field's type
    _check(settings)
    return settings


def _typed(values: Mapping[str, object], spell: Callable[[str], str], *, is_text: bool) -> dict[str, object]:
    """The values as their fields' types. Raises ConfigError with the setting as `spell` writes it for where it came from.

    `is_text`: numbers may be written as text, because where they come from there is nothing else.
    """
    known = {field.name: field.type for field in msgspec.structs.fields(RouterSettings)}
    typed: dict[str, object] = {}
    for name, value in values.items():
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]}?" if close else "; docs/config.md lists the settings"
            raise ConfigError(f"{spell(name)} is no setting of the router{hint}")
        try:
            if name in _TABLES:
                _check_models(value, spell(name))
            typed[name] = msgspec.convert(value, known[name], strict=not is_text)
        except msgspec.ValidationError as error:
            kind = known[name]
            if isinstance(kind, type) and issubclass(kind, enum.StrEnum):
                raise ConfigError(f"{spell(name)} is {value!r}, but must be one of {', '.join(kind)}") from error
            wanted = _IN_WORDS.get(kind)
            what = f"must be {wanted}" if wanted else str(error)
            raise ConfigError(f"{spell(name)} is {value!r}: {what}") from error
    return typed


_IN_WORDS: Mapping[object, str] = {
    int: "a whole number, as 8000",
    float: "a number, as 2.5",
    bool: "true or false",
    tuple[str, ...]: "a list of texts, as ['a', 'b']",
}


def _check_models(tables: object, spelt: str) -> None:
    """Raises ConfigError with the model and the setting at fault."""
    if not isinstance(tables, dict):
        raise ConfigError(f'{spelt} is {tables!r}: write tables [router.model."NAME"]')
    known = ModelSettings.__struct_fields__
    for model, settings in tables.items():
        if not isinstance(settings, dict):
            raise ConfigError(f'{spelt}.{model} is {settings!r}: write a table [router.model."{model}"]')
        for name, value in settings.items():
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"
                raise ConfigError(f'{spelt} "{model}": {name} is no setting of a model; {hint}')
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ConfigError(f'{spelt} "{model}": {name} is {value!r}: must be a number of seconds, as 2.5')


def _variable(name: str) -> str:
    return ENVIRONMENT_PREFIX + name.upper()


def _flag(name: str) -> str:
    return "--" + name.removesuffix("_s").replace("_", "-")


def _read_table(path: Path) -> dict[str, object]:
    try:
        document = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"--config {path}: cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: is not valid TOML: {error}") from error
    if stray := sorted(document.keys() - {"router"}):
        raise ConfigError(f"--config {path}: {stray[0]} stands outside of the table; write the settings below a line [router]")
    table = document.get("router", {})
    if not isinstance(table, dict):
        raise ConfigError(f"--config {path}: router must be a table; write the settings below a line [router]")
    return table


def _from_environment(environ: Mapping[str, str]) -> dict[str, object]:
    values: dict[str, object] = {}
    for name in RouterSettings.__struct_fields__:
        if name in _TABLES:
            continue  # a table does not fit into a variable
        text = environ.get(_variable(name))
        if not text:
            continue
        if name in _LISTS:
            values[name] = tuple(part for part in text.replace(",", " ").split() if part)
        elif name in _BOOLEANS:
            values[name] = _boolean(name, text)
        else:
            values[name] = text
    return values


def _boolean(name: str, text: str) -> bool:
    match text.strip().lower():
        case "1" | "true" | "yes" | "on":
            return True
        case "0" | "false" | "no" | "off":
            return False
        case _:
            raise ConfigError(f"{_variable(name)} is {text!r}: use true or false")


def _check(settings: RouterSettings) -> None:
    for name, port in (("port", settings.port), ("admin_port", settings.admin_port)):
        if not 0 <= port <= 65535:
            raise ConfigError(f"{name} {port}: a port is a number from 1 to 65535 (0 picks a free one)")
    if settings.port == settings.admin_port != 0:
        raise ConfigError(f"port and admin_port are both {settings.port}: the admin API needs a port of its own")
    for name in (
        "health_interval_s",
        "connect_timeout_s",
        "first_byte_timeout_s",
        "idle_timeout_s",
        "keep_alive_s",
        "stall_after_s",
        "body_timeout_s",
        "max_body_bytes",
        "max_attempts",
    ):
        if not 0 < (value := getattr(settings, name)) < math.inf:
            raise ConfigError(f"{name} {value}: must be a number greater than 0")
    for name in ("drain_timeout_s", "total_timeout_s"):
        if not 0 <= (value := getattr(settings, name)) < math.inf:
            raise ConfigError(f"{name} {value}: must be a number, 0 or greater")
    for model, special in settings.model.items():
        for name in special.__struct_fields__:
            if (value := getattr(special, name)) is not None and not 0 < value < math.inf:
                raise ConfigError(f"[router.model.{model!r}] {name} {value}: must be a number greater than 0")
    if settings.served_model_name is not None and (others := settings.model.keys() - {settings.served_model_name}):
        name = sorted(others)[0]
        raise ConfigError(f"[router.model.{name!r}]: clients know the model as {settings.served_model_name!r}; use that name")
    for origin in settings.cors_origin:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise ConfigError(
                f"cors_origin {origin!r}: a browser's origin has a scheme and no path, as https://app.example.com"
            )
    for url in settings.replica:
        check_replica_url(url)
    if not 1 <= settings.workers <= WORKERS_MAX:
        raise ConfigError(f"workers {settings.workers}: must be from 1 to {WORKERS_MAX}; about one for each core that is free")
    if settings.redis is not None:
        _check_redis_url(settings.redis)
    if not settings.redis_channel:
        raise ConfigError("redis_channel is empty: give a name, the same for all routers of a fleet")
    if settings.replica_file is not None and not Path(settings.replica_file).is_file():
        raise ConfigError(f"replica_file {settings.replica_file}: there is no such file; write one URL a line into it first")
    if settings.decision_log is not None:
        _check_writable("decision_log", Path(settings.decision_log))
    secrets = [("api_key", key) for key in settings.api_key]
    secrets += [(name, getattr(settings, name)) for name in ("admin_token", "agent_token", "upstream_key")]
    for name, secret in secrets:
        # RFC 6750's characters of a bearer token; they also need no quoting in a shell, a list or a header.
        if secret is not None and not _TOKEN.fullmatch(secret):
            raise ConfigError(f"{name}: only letters, digits and the characters - . _ ~ + / = : may stand in it")
    if settings.require_keys and not settings.api_key:
        raise ConfigError("require_keys is set but there is no key: give at least one --api-key (or INTELLECT_API_KEY)")
    if settings.require_keys and settings.allow_anonymous:
        raise ConfigError("require_keys and allow_anonymous contradict each other: remove one")
    if not settings.api_key and not settings.allow_anonymous and not is_loopback(settings.host):
        raise ConfigError(
            f"host {settings.host}: without a key the router serves only this machine; "
            "give --api-key (or INTELLECT_API_KEY), or --allow-anonymous if anyone who reaches the port may use it"
        )
    if settings.admin_token is None and not is_loopback(settings.admin_host):
        raise ConfigError(
            f"admin_host {settings.admin_host}: the admin API serves only this machine without a token; "
            "give --admin-token (or INTELLECT_ADMIN_TOKEN)"
        )


def _check_writable(name: str, path: Path) -> None:
    """Raises ConfigError unless a file can be written there, as far as that can be told without doing it."""
    if path.is_dir():
        raise ConfigError(f"{name} {path}: is a folder; give a file in it")
    if path.exists() and not path.is_file():
        raise ConfigError(f"{name} {path}: is not a regular file; give a file that may be written")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"{name} {path}: its folder does not exist; make it first")
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise ConfigError(f"{name} {path}: may not be written; give a file that the router's user may write")


def check_replica_url(url: str) -> None:
    """Raises ConfigError unless `url` is http://HOST:PORT."""
    match = _REPLICA_URL.fullmatch(url)
    if match is None or not 0 < int(match["port"]) <= 65535:
        hint = "; https is not supported, engines belong into a private network" if url.startswith("https:") else ""
        hint = "; repeat --replica for several" if "," in url else hint
        raise ConfigError(f"replica {url!r}: give the engine's or its agent's URL as http://HOST:PORT{hint}")


def _check_redis_url(url: str) -> None:
    """Raises ConfigError, without the password, unless it is redis://, rediss:// or unix://."""
    match = _REDIS_URL.fullmatch(url)
    if match is None or not 0 < int(match["port"] or 6379) <= 65535 or not _is_address(match["ip"]):
        _, at, place = url.rpartition("@")
        shown = f"***@{place}" if at else url
        raise ConfigError(
            f"redis {shown!r}: give redis://[USER:PASSWORD@]HOST[:PORT], rediss:// for TLS, or unix:///PATH; "
            "in a password, write characters such as @ / : with % (RFC 3986)"
        )


def _is_address(ip: str | None) -> bool:
    try:
        return ip is None or bool(ipaddress.ip_address(ip))
    except ValueError:
        return False


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
