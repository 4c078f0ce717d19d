"""The router's settings, from file, environment and flags."""

from pathlib import Path

import pytest

from router.config import ConfigError, ModelSettings, RouterSettings, load_settings
from router.policy.catalogue import PolicyName


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "router.toml"
    path.write_text(text)
    return path


def test_flags_win_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    """A value can be overridden where it is needed without editing the file."""
    file = write(tmp_path, '[router]\nport = 1000\nadmin_port = 2000\nhealth_interval_s = 3\nreplica = ["http://a:1"]\n')
    environ = {"INTELLECT_ADMIN_PORT": "2001", "INTELLECT_HEALTH_INTERVAL_S": "4.5", "INTELLECT_API_KEY": "k1, k2"}
    settings = load_settings(file, environ, {"health_interval_s": 5.0, "port": None})
    assert (settings.port, settings.admin_port, settings.health_interval_s) == (1000, 2001, 5.0)
    assert settings.api_key == ("k1", "k2")
    assert settings.replica == ("http://a:1",)
    assert settings.policy is PolicyName.PREDICTED


def test_without_anything_the_defaults_hold() -> None:
    """The router starts with no configuration at all, for this machine only."""
    assert load_settings(None, {}, {}) == RouterSettings()


@pytest.mark.parametrize(
    ("file", "environ", "flags", "message"),
    [
        ("[router]\nprot = 1\n", {}, {}, r"router\.toml: prot is no setting of the router; did you mean port\?"),
        ("[router]\nport = 'x'\n", {}, {}, "port"),
        ("router = 3\n", {}, {}, r"\[router\]"),
        ("[router\n", {}, {}, "not valid TOML"),
        (
            "port = 8020\n",
            {},
            {},
            r"router\.toml: port stands outside of the table; write the settings below a line \[router\]",
        ),
        (None, {"INTELLECT_PORT": "eight"}, {}, "INTELLECT_PORT is 'eight'"),
        (None, {"INTELLECT_REQUIRE_KEYS": "maybe"}, {}, "INTELLECT_REQUIRE_KEYS is 'maybe': use true or false"),
        (None, {}, {"port": 70000}, "port 70000"),
        (None, {}, {"port": 9, "admin_port": 9}, "a port of its own"),
        (None, {}, {"policy": "magic"}, "--policy is 'magic', but must be one of predicted, least_loaded"),
        (None, {}, {"replica_file": "/nowhere/replicas.txt"}, "replica_file /nowhere/replicas.txt: there is no such file"),
        (None, {}, {"health_interval_s": 0}, "health_interval_s 0.0: must be a number greater than 0"),
        (None, {}, {"drain_timeout_s": -1}, "drain_timeout_s"),
        (None, {"INTELLECT_DRAIN_TIMEOUT_S": "nan"}, {}, "drain_timeout_s"),
        (None, {"INTELLECT_IDLE_TIMEOUT_S": "inf"}, {}, "idle_timeout_s"),
        (None, {}, {"max_body_bytes": 0}, "max_body_bytes"),
        (None, {}, {"replica": ("127.0.0.1:8200",)}, "http://HOST:PORT"),
        (None, {}, {"replica": ("http://h:1/v1",)}, "http://HOST:PORT"),
        (None, {}, {"replica": ("http://user@h:1",)}, "http://HOST:PORT"),
        (None, {}, {"replica": ("http://h:99999",)}, "http://HOST:PORT"),
        (None, {}, {"replica": ("http://h",)}, "http://HOST:PORT"),
        (None, {}, {"replica": ("http://h:0",)}, "http://HOST:PORT"),
        (None, {}, {"replica": ("http://h i:1",)}, "http://HOST:PORT"),
        (None, {}, {"replica": ("http://h:8\n2",)}, "http://HOST:PORT"),
        (None, {}, {"replica": ("http://a\ud800b:1",)}, "http://HOST:PORT"),
        (None, {}, {"api_key": ("a b",)}, "api_key"),
        (None, {}, {"api_key": ("a,b",)}, "api_key"),
        (None, {}, {"api_key": ('a"; id; echo "',)}, "api_key"),
        (None, {}, {"admin_token": " a"}, "admin_token"),
        (None, {}, {"agent_token": "\u00e9"}, "agent_token"),
        (None, {}, {"upstream_key": "a\r\nx: y"}, "upstream_key"),
        (None, {}, {"require_keys": True}, "at least one --api-key"),
        (None, {}, {"require_keys": True, "allow_anonymous": True, "api_key": ("k",)}, "contradict"),
        (None, {}, {"host": "0.0.0.0"}, "--allow-anonymous"),
        (None, {}, {"admin_host": "::"}, "--admin-token"),
        (None, {}, {"decision_log": "/nowhere/log"}, "decision_log /nowhere/log: its folder does not exist; make it first"),
        (None, {}, {"decision_log": "/"}, "decision_log /: is a folder; give a file in it"),
        (None, {}, {"workers": 0}, "workers 0: must be from 1 to 256"),
        (None, {"INTELLECT_WORKERS": "many"}, {}, "INTELLECT_WORKERS is 'many': must be a whole number"),
        (None, {}, {"redis": "localhost:6379"}, r"redis 'localhost:6379': give redis://"),
        (None, {}, {"redis": "http://localhost:6379"}, "give redis://"),
        (None, {}, {"redis": "redis://"}, "give redis://"),
        (None, {}, {"redis": "redis://h:0"}, "give redis://"),
        (None, {}, {"redis": "redis://h:99999"}, "give redis://"),
        (None, {}, {"redis": "redis://h?socket_timeout=9"}, "give redis://"),
        (None, {}, {"redis": "unix://"}, "give redis://"),
        (None, {}, {"redis": "redis://[::::]:1"}, "give redis://"),
        (None, {}, {"redis": "redis://h?ssl_ca_certs=/ca.pem"}, "give redis://"),
        (None, {"INTELLECT_REDIS": "redis://u:p@ss@h"}, {}, r"redis '\*\*\*@h': give redis://"),
        ("[router]\nredis_channel = ''\n", {}, {}, "redis_channel is empty"),
    ],
)
def test_a_setting_that_cannot_be_used_is_named_with_its_remedy(
    tmp_path: Path, file: str | None, environ: dict[str, str], flags: dict[str, object], message: str
) -> None:
    """A typing error is found at the start, with the key and the value, not at the first request."""
    path = None if file is None else write(tmp_path, file)
    with pytest.raises(ConfigError, match=message):
        load_settings(path, environ, flags)


def test_a_missing_file_is_an_error() -> None:
    """A wrong path is not taken for an empty configuration."""
    with pytest.raises(ConfigError, match="cannot be read"):
        load_settings(Path("/nowhere/router.toml"), {}, {})


@pytest.mark.parametrize(
    "url",
    [
        "redis://localhost",
        "redis://10.0.0.1:6380/0",
        "redis://:secret%40word@redis.internal:6379",
        "rediss://user:secret@[::1]:6379/?ssl_ca_certs=/etc/ca.pem",
        "unix:///run/redis.sock",
        "unix://:secret@/run/redis.sock",
    ],
)
def test_every_usual_way_to_name_a_redis_is_taken(url: str) -> None:
    """As the client library spells them."""
    assert load_settings(None, {"INTELLECT_REDIS": url}, {}).redis == url


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.8.8.8"])
def test_this_machine_needs_no_key(host: str) -> None:
    """A laptop's user is not asked for keys."""
    assert load_settings(None, {}, {"host": host, "admin_host": host}).host == host


def test_other_machines_are_served_with_a_key_or_on_demand() -> None:
    """Listening on all interfaces takes one deliberate step."""
    assert load_settings(None, {"INTELLECT_API_KEY": "k"}, {"host": "0.0.0.0"}).host == "0.0.0.0"
    assert load_settings(None, {}, {"host": "0.0.0.0", "allow_anonymous": True}).allow_anonymous


def test_one_model_can_have_limits_of_its_own(tmp_path: Path) -> None:
    """A reasoning model may think for minutes while others are held to seconds."""
    file = write(tmp_path, '[router]\nidle_timeout_s = 9\n[router.model."org/deep"]\nfirst_byte_timeout_s = 900\n')
    settings = load_settings(file, {}, {})
    assert settings.model == {"org/deep": ModelSettings(first_byte_timeout_s=900.0)}


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("idle_timeout_s = -1", r"\[router.model.'m'\] idle_timeout_s -1.0: must be a number greater than 0"),
        ("idle_timeout = 1", r'model "m": idle_timeout is no setting of a model; did you mean idle_timeout_s\?'),
        ("tokens = 1", "there are first_byte_timeout_s, idle_timeout_s, total_timeout_s"),
        ("idle_timeout_s = 'long'", r'model "m": idle_timeout_s is .long.: must be a number of seconds'),
    ],
)
def test_a_models_limits_are_checked_like_all_settings(tmp_path: Path, table: str, message: str) -> None:
    """A typing error is found at the start, with its name."""
    with pytest.raises(ConfigError, match=message):
        load_settings(write(tmp_path, f"[router.model.m]\n{table}\n"), {}, {})


def test_an_unknown_way_to_continue_is_refused_with_those_there_are() -> None:
    """The operator need not look them up."""
    with pytest.raises(ConfigError, match="--continuation is 'always', but must be one of off, safe"):
        load_settings(None, {}, {"continuation": "always"})


@pytest.mark.parametrize(
    ("file", "environ", "flags", "message"),
    [
        ("port = '8000'", {}, {}, "port is '8000': must be a whole number"),
        ("idle_timeout_s = '5'", {}, {}, "idle_timeout_s is '5': must be a number"),
        ("replica = 'http://a:1'", {}, {}, "replica is 'http://a:1': must be a list"),
        ("model = 3", {}, {}, r'write tables \[router.model."NAME"\]'),
        ("", {"INTELLECT_PORT": "abc"}, {}, "INTELLECT_PORT is 'abc': must be a whole number"),
        ("", {}, {"cors_origin": ("example.com",)}, "a browser's origin has a scheme"),
        ("", {}, {"replica": ("https://a:1",)}, "https is not supported"),
        ("", {}, {"replica": ("http://a:1,http://b:1",)}, "repeat --replica"),
        ("served_model_name = 'a'\n[router.model.b]\nidle_timeout_s = 1", {}, {}, "clients know the model as 'a'"),
    ],
)
def test_a_wrong_setting_says_in_plain_words_what_it_must_be(
    tmp_path: Path, file: str, environ: dict[str, str], flags: dict[str, object], message: str
) -> None:
    """Nobody needs to know how the settings are read in order to mend them."""
    with pytest.raises(ConfigError, match=message):
        load_settings(write(tmp_path, f"[router]\n{file}\n"), environ, flags)
