"""OpenAI's own library for Node, unmodified. node/run.mjs makes the calls; what it saw is judged here."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.clients.service import EMBEDDING_MODEL, KEY, MODEL, Service

SOURCE = Path(__file__).parent / "node"
INSTALLED = Path(__file__).resolve().parents[2] / "build" / "clients-node"
Seen = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def folder() -> Path:
    """The script beside its library, which npm installs when package.json has changed."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("node and npm are not installed")
    INSTALLED.mkdir(parents=True, exist_ok=True)
    wanted, stamp = (SOURCE / "package.json").read_text(), INSTALLED / ".installed"
    shutil.copy(SOURCE / "run.mjs", INSTALLED)
    if not stamp.exists() or stamp.read_text() != wanted:
        shutil.copy(SOURCE / "package.json", INSTALLED)
        npm = ["npm", "install", "--no-package-lock", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"]
        done = subprocess.run(npm, cwd=INSTALLED, capture_output=True, text=True, check=False, timeout=90)
        assert done.returncode == 0, f"npm install failed:\n{done.stderr}"
        stamp.write_text(wanted)
    return INSTALLED


@pytest.fixture(scope="module")
def everything(folder: Path, running_service: Service) -> Seen:
    """What each case saw or how it failed."""
    command = ["node", "run.mjs", running_service.router.v1, KEY, MODEL, EMBEDDING_MODEL]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    running_service.await_idle()
    seen: Seen = json.loads(done.stdout)
    return seen


def look(everything: Seen, case: str) -> Any:
    assert "failed" not in everything[case], everything[case]["failed"]
    return everything[case]["seen"]


def test_streams_and_helpers_have_the_text_of_the_whole_answer(everything: Seen) -> None:
    """`for await`, `.stream(...)` and a plain call agree, and the request's id is shown."""
    whole, stream = look(everything, "whole"), look(everything, "stream")
    assert whole["text"]
    assert stream["count"] > 2
    assert stream["text"] == whole["text"] == look(everything, "helper")["text"]
    assert whole["requestID"] == whole["header"]


def test_usage_comes_last_where_it_was_asked_for(everything: Seen) -> None:
    """One chunk without choices, at the end."""
    usage = look(everything, "usage")
    assert (usage["choices"], usage["earlier"]) == (0, True)
    assert usage["total"] > 0


def test_break_and_abort_end_the_work(everything: Seen) -> None:
    """Both leave the engine idle, which the fixture has waited for."""
    assert look(everything, "left") == {"aborted": True}
    assert look(everything, "aborted")["kind"] == "APIUserAbortError"


def test_a_tool_is_called_and_its_result_answered(everything: Seen) -> None:
    """Whole and streamed."""
    called, streamed = look(everything, "tools"), look(everything, "streamedTools")
    assert called["reason"] == streamed["reason"] == "tool_calls"
    assert called["text"]
    assert called["city"]
    assert streamed["name"] == "forecast"
    assert streamed["city"]


def test_models_are_listed_and_found_by_id(everything: Seen) -> None:
    """Also an id with a slash."""
    assert look(everything, "models") == {"listed": [MODEL, EMBEDDING_MODEL], "found": MODEL}


def test_responses_are_created_and_streamed(everything: Seen) -> None:
    """The newer API gives the same text in both ways."""
    responses = look(everything, "responses")
    assert responses["whole"]
    assert responses["streamed"] == responses["whole"]
    assert responses["last"] in ("response.completed", "response.incomplete")


def test_embeddings_come_as_numbers(everything: Seen) -> None:
    """The library decodes what it asked for as base64."""
    assert look(everything, "embeddings") == {"indices": [0, 1], "numbers": True}


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("badRequest", ("BadRequestError", 400, "unsupported_parameter", "functions")),
        ("unknownModel", ("NotFoundError", 404, "model_not_found", "model")),
        ("wrongKey", ("AuthenticationError", 401, "invalid_api_key", None)),
    ],
)
def test_errors_have_the_librarys_classes(everything: Seen, case: str, expected: tuple[Any, ...]) -> None:
    """Status, code, param and the request's id."""
    error = look(everything, case)
    assert error is not None, "nothing was thrown"
    assert (error["kind"], error["status"], error["code"], error["param"]) == expected
    assert error["requestID"]
