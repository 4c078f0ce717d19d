"""A public name for the model."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from router.model_alias import ModelAlias

ENGINE = "/models/secret path"
ALIAS = ModelAlias(public="acme", engine=ENGINE)


@given(st.text(max_size=40))
def test_the_engines_name_is_replaced_where_it_is_the_model_and_nowhere_else(text: str) -> None:
    """Clients see one name everywhere; what a model writes about names stays as it wrote it."""
    for words in (text, f'"model":"{ENGINE}"', ENGINE):
        answer = {"id": "x", "model": ENGINE, "choices": [{"message": {"content": words}}]}
        assert msgspec.json.decode(ALIAS.answer(msgspec.json.encode(answer))) == {**answer, "model": "acme"}
