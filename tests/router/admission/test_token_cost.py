"""What a request costs its tenant."""

import pytest

from protocol.usage import Usage
from router.admission.token_cost import EstimatedCost, used
from router.policy.interface import PlacementRequest
from router.policy.prompt import BytesPrompt


@pytest.mark.parametrize(("output_max", "cost"), [(None, 100 + 512), (10, 100 + 20), (0, 100), (-1, 100), (65_536, 100 + 512)])
def test_an_estimate_takes_the_usual_output_or_the_limit_if_less(output_max: int | None, cost: float) -> None:
    """A generous limit costs nothing before it is used."""
    assert EstimatedCost()(PlacementRequest("m", BytesPrompt(b"x" * 400, 0), output_max=output_max)) == cost


def test_a_body_longer_than_any_context_counts_as_the_longest_context() -> None:
    """An image in base64 is not taken for a backlog of minutes."""
    assert EstimatedCost()(PlacementRequest("m", BytesPrompt(b"", 0, size=2_500_000), output_max=0)) == 131_072


@pytest.mark.parametrize(
    ("usage", "cost"), [(Usage(100, 30), 160), (Usage(100, 30, 0), 160), (Usage(100, 30, 90), 70), (Usage(100, 30, 200), 60)]
)
def test_output_counts_twice_and_cached_tokens_not_at_all(usage: Usage, cost: float) -> None:
    """A tenant pays for what was computed for it."""
    assert used(usage) == cost


def test_an_estimate_of_nothing_is_refused() -> None:
    """A setting that makes requests free is named with its remedy."""
    with pytest.raises(ValueError, match=r"bytes_per_token is 0\.0; it must be above 0"):
        EstimatedCost(bytes_per_token=0.0)
