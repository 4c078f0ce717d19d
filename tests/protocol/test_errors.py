import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import encode_detail, encode_error, error_type, read_error


def body(value: object) -> bytes:
    return json.dumps(value).encode()


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "invalid_request_error"),
        (413, "invalid_request_error"),
        (422, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "server_error"),
        (502, "server_error"),
        (503, "server_error"),
    ],
)
def test_the_type_follows_the_status(status: int, expected: str) -> None:
    """SDKs and dashboards group errors by type."""
    assert error_type(status) == expected


def test_an_error_has_all_four_keys() -> None:
    """OpenAI's clients read message, type, param and code, and find null rather than nothing."""
    assert json.loads(encode_error(404, "no", code="model_not_found", param="model")) == {
        "error": {"message": "no", "type": "invalid_request_error", "param": "model", "code": "model_not_found"}
    }
    assert json.loads(encode_error(500, "no")) == {
        "error": {"message": "no", "type": "server_error", "param": None, "code": None}
    }


@pytest.mark.parametrize(
    ("status", "answer", "message", "param", "code"),
    [
        # vLLM's own object: its class name as type, the status as code.
        (
            400,
            body({"error": {"message": "bad n", "type": "BadRequestError", "param": "n", "code": 400}}),
            "bad n",
            "n",
            None,
        ),
        (
            404,
            body({"error": {"message": "No model `x`.", "type": "NotFoundError", "param": "model", "code": 404}}),
            "No model `x`.",
            "model",
            "model_not_found",
        ),
        (
            400,
            body({"error": {"message": "This model's maximum context length is 8192 tokens.", "param": "input_tokens"}}),
            "This model's maximum context length is 8192 tokens.",
            "input_tokens",
            "context_length_exceeded",
        ),
        (401, body({"error": "Unauthorized"}), "Unauthorized", None, None),
        (404, body({"detail": "Not Found"}), "Not Found", None, None),
        (503, b"upstream is busy\n", "upstream is busy", None, None),
        (500, b"", "The engine answered with status 500.", None, None),
        (422, body({"detail": [{"msg": "Field required"}]}), "The engine answered with status 422.", None, None),
        (500, body(["x"]), "The engine answered with status 500.", None, None),
        (500, b"\xff\xfe", "\ufffd\ufffd", None, None),
        (400, body({"error": {"message": "m", "code": "already_ours"}}), "m", None, "already_ours"),
    ],
)  # fmt: skip
def test_whatever_an_engine_answers_reaches_the_client_in_openai_shape(
    status: int, answer: bytes, message: str, param: str | None, code: str | None
) -> None:
    """A client meets one shape of error, from whichever layer it comes."""
    assert json.loads(encode_detail(read_error(status, answer))) == {
        "error": {"message": message, "type": error_type(status), "param": param, "code": code}
    }


def test_a_long_page_is_cut() -> None:
    """An HTML page of a broken proxy does not become the message in full."""
    message = json.loads(encode_detail(read_error(502, b"<html>" + b"x" * 10_000)))["error"]["message"]
    assert len(message) == 500


@given(status=st.integers(400, 599), answer=st.binary(max_size=300))
def test_no_answer_breaks_the_shape(status: int, answer: bytes) -> None:
    """Any bytes with any error status become an error with a message."""
    error = json.loads(encode_detail(read_error(status, answer)))["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
