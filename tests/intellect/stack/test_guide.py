from dataclasses import replace
from pathlib import Path

import pytest

from intellect.places import STATE_DIR_DEFAULT, places
from intellect.stack.guide import base_url, curl_line, guide, python_snippet
from tests.intellect.stack.test_plan import OPTIONS

ANONYMOUS = replace(OPTIONS, api_keys=(), places=places(STATE_DIR_DEFAULT))


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000/v1"),
        ("0.0.0.0", "http://127.0.0.1:8000/v1"),
        ("::", "http://[::1]:8000/v1"),
        ("::1", "http://[::1]:8000/v1"),
        ("10.0.0.5", "http://10.0.0.5:8000/v1"),
    ],
)
def test_the_url_can_be_used_on_this_machine(host: str, url: str) -> None:
    """A wildcard is an address to listen on, not one to call."""
    assert base_url(replace(ANONYMOUS, host=host)) == url


def test_a_key_given_by_flag_stands_in_the_commands() -> None:
    """They work as they stand."""
    assert ' -H "Authorization: Bearer client-secret" ' in curl_line(OPTIONS, {}, stream=False)
    assert 'api_key="client-secret"' in python_snippet(OPTIONS, {})


def test_a_key_in_the_environment_is_not_printed() -> None:
    """The user's shell has it; the screen and the log need not."""
    environ = {"INTELLECT_API_KEY": "client-secret"}
    text = guide(OPTIONS, seconds=1, environ=environ, command="intellect")
    assert "client-secret" not in text
    assert "Bearer $INTELLECT_API_KEY" in text
    assert 'os.environ["INTELLECT_API_KEY"]' in text


def test_defaults_are_not_spelt_out() -> None:
    """The swap commands are as short as they can be; other places and ports are named."""
    plain = guide(ANONYMOUS, seconds=1, environ={}, command="intellect")
    assert "intellect checkpoint publish FOLDER --model tiny --version v1\n" in plain
    assert "intellect checkpoint swap v1 --model tiny\n" in plain
    other = guide(replace(ANONYMOUS, admin_port=9001, places=places(Path("/a b"))), seconds=1, environ={}, command="intellect")
    assert "--version v1 --store '/a b/checkpoints'\n" in other
    assert "swap v1 --model tiny --admin http://127.0.0.1:9001\n" in other


def test_a_shell_that_does_not_find_intellect_is_given_its_path() -> None:
    """Without an activated environment the printed swap works too."""
    text = guide(ANONYMOUS, seconds=1, environ={}, command="/my env/bin/intellect")
    assert "\n'/my env/bin/intellect' checkpoint swap v1 --model tiny\n" in text
