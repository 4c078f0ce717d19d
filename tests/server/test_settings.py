"""Settings of the agent: a wrong value is refused at once, named, with what would be right."""

from collections.abc import Callable
from typing import Any

import pytest

from server.settings import AgentSettings, ExpertParallelRank, RestartPolicy, SwapDeadlines, is_loopback, is_wildcard

RANK = {"group": "g", "rank": 1, "size": 2, "local_rank": 1, "address": "10.0.0.1"}


@pytest.mark.parametrize(
    ("make", "fields", "message"),
    [
        (AgentSettings, {"served_model_name": "a b"}, "served_model_name.*'a b'"),
        (AgentSettings, {"served_model_name": "../x"}, "served_model_name"),
        (AgentSettings, {"port": 0}, "port is 0"),
        (AgentSettings, {"admin_port": 65536}, "admin_port is 65536"),
        (AgentSettings, {"port": 9000, "admin_port": 9000}, "admin_port is 9000.*another than port"),
        (AgentSettings, {"token": "short"}, "token is .hidden."),
        (AgentSettings, {"host": "0.0.0.0"}, "host is 0.0.0.0.*no token.*INTELLECT_AGENT_TOKEN"),
        (AgentSettings, {"host": "example.org"}, "no token"),
        (AgentSettings, {"start_timeout_s": 0}, "start_timeout_s is 0"),
        (ExpertParallelRank, {**RANK, "group": ""}, "group"),
        (ExpertParallelRank, {**RANK, "rank": 2}, "rank is 2.*from 0 to 1"),
        (ExpertParallelRank, {**RANK, "size": 1}, "size is 1"),
        (ExpertParallelRank, {**RANK, "local_rank": 2}, "local_rank is 2"),
        (ExpertParallelRank, {**RANK, "rpc_port": 0}, "rpc_port is 0"),
        (RestartPolicy, {"first_delay_s": 0}, "first_delay_s is 0"),
        (RestartPolicy, {"delay_s_max": 0.5}, "delay_s_max is 0.5"),
        (RestartPolicy, {"jitter": 2}, "jitter is 2"),
        (RestartPolicy, {"failures_max": 0}, "failures_max is 0"),
        (RestartPolicy, {"hang_s": 0}, "hang_s is 0"),
        (SwapDeadlines, {"pause_s": 0}, "swap.pause_s is 0"),
    ],
)
def test_a_wrong_value_is_named(make: Callable[..., object], fields: dict[str, Any], message: str) -> None:
    """The error says which setting, which value, and what to do."""
    defaults: dict[str, Any] = {"served_model_name": "m"} if make is AgentSettings else {}
    with pytest.raises(ValueError, match=message):
        make(**{**defaults, **fields})


def test_other_machines_may_reach_an_agent_with_a_token() -> None:
    """A token lifts the restriction to loopback, and is not printed with the settings."""
    settings = AgentSettings(served_model_name="m", host="0.0.0.0", token="a-long-enough-token")
    assert "a-long-enough-token" not in repr(settings)


@pytest.mark.parametrize(
    ("host", "loopback", "wildcard"),
    [
        ("127.0.0.1", True, False),
        ("127.8.8.8", True, False),
        ("::1", True, False),
        ("localhost", True, False),
        ("0.0.0.0", False, True),
        ("::", False, True),
        ("10.1.2.3", False, False),
        ("example.org", False, False),
    ],
)
def test_hosts_are_told_apart(host: str, loopback: bool, wildcard: bool) -> None:
    """Only what certainly stays on this machine counts as loopback."""
    assert (is_loopback(host), is_wildcard(host)) == (loopback, wildcard)
