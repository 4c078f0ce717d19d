"""Reading what routing needs from a request."""

import pytest

from protocol.openai import InvalidRequestError, peek


def test_only_the_model_is_read_and_the_rest_is_left_alone() -> None:
    """Fields that the router does not know cannot make a request fail."""
    assert peek(b'{"messages": [{"x": 1e400}], "model": "m", "anything": {"deep": [1, null]}}').model == "m"
    assert peek(b'{"model": null}').model is None
    assert peek(b"{}").model is None


def test_the_last_of_two_equal_keys_counts_as_it_does_for_the_engine() -> None:
    """Router and engine never read two different models out of one body."""
    assert peek(b'{"model": "a", "model": "b"}').model == "b"


@pytest.mark.parametrize(("body", "param"), [(b'{"model": 1}', "model"), (b'{"model": ["m"]}', "model"), (b"3", None)])
def test_a_wrong_type_names_its_field(body: bytes, param: str | None) -> None:
    """The error points at what to change."""
    with pytest.raises(InvalidRequestError) as error:
        peek(body)
    assert error.value.param == param
