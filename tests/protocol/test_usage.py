"""An engine's token counts are taken where they can be counts, and else as if it had not told them."""

import msgspec
import pytest

from protocol.usage import TOKENS_END, Usage, UsageField


@pytest.mark.parametrize(
    ("told", "read"),
    [
        ("0", 0),
        (str(TOKENS_END - 1), TOKENS_END - 1),
        (str(TOKENS_END), None),
        (str(2**64), None),
        (str(10**320), None),
        ("-1", None),
        (str(-(2**70)), None),
        ("null", None),
    ],
)
@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt_tokens":%b,"completion_tokens":%b,"prompt_tokens_details":{"cached_tokens":%b}}',
        b'{"input_tokens":%b,"output_tokens":%b,"input_tokens_details":{"cached_tokens":%b}}',
        b'{"input_tokens":%b,"output_tokens":%b,"cache_read_input_tokens":%b}',
    ],
)
def test_a_count_that_no_answer_can_have_is_not_told(body: bytes, told: str, read: int | None) -> None:
    """A broken engine neither disturbs what the router learns nor what it says."""
    count = told.encode()
    field = msgspec.json.decode(body % (count, count, count), type=UsageField)
    assert field.read() == Usage(read or 0, read or 0, read)
