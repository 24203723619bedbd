"""Objects of JSON that were cut at any character."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orca_jax.text.json_end import cut_object

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.text(max_size=4) | st.just('}],"{\\'),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=3), VALUES, max_size=4), st.booleans(), st.data())
def test_every_beginning_of_an_object_has_the_members_before_the_cut(
    value: dict[str, Any], is_ascii: bool, data: st.DataObject
) -> None:
    text = json.dumps(value, ensure_ascii=is_ascii)
    cut = data.draw(st.integers(1, len(text) - 1))
    found = cut_object(text[:cut])
    assert found is not None
    whole = list(found.items())[:-1]
    assert list(value.items())[: len(whole)] == whole and len(found) <= len(value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"city": "Par', {"city": "Par"}),
        ('{"a": 1, "b"', {"a": 1}),
        ('{"a": tr', {}),
        ('{"a": "x\\u00', {}),
        ('{"a": [1, 2, {"b": "c\\"', {"a": [1, 2, {"b": 'c"'}]}),
    ],
)
def test_examples(text: str, value: dict[str, Any]) -> None:
    assert cut_object(text) == value


@pytest.mark.parametrize(
    "text", ["", "city", "[1", '"a', "{]", "{}}", "{'a': 1", "[" * 10**6, '{"a":' * 10**5]
)
def test_anything_else_is_none(text: str) -> None:
    assert cut_object(text) is None
