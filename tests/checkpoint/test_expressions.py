"""Expressions of configs: `re`'s answer in bounded time."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jitgemm.checkpoint import expressions
from jitgemm.checkpoint.expressions import matches

_PARTS = st.sampled_from(
    ["a", "b", "A", ".", r"\.", r"\d", r"\W", r"\s", "[ab]", "[^a]", r"[\d.]", "^", "$", r"\Z", r"\b", r"\B", "(?<=a)", "(?<!ab)"]
)  # fmt: skip
_EXPRESSIONS = st.recursive(
    _PARTS,
    lambda inner: st.one_of(
        st.builds("{}{}".format, inner, inner),
        st.builds("({}|{})".format, inner, inner),
        st.builds("(?:{}){}".format, inner, st.sampled_from(["*", "+", "?", "{1,2}", "{2}", "*?", "{0,3}?", "{2,}"])),
        st.builds("(?{}{})".format, st.sampled_from("=!"), inner),
    ),
    max_leaves=8,
)


@given(st.sampled_from(["", "(?i)"]), _EXPRESSIONS, st.text("abA1. ", min_size=1, max_size=8), st.booleans())
@settings(max_examples=400, deadline=None)
def test_the_answer_is_that_of_re(flags, expression, name, search):
    expected = (re.search if search else re.match)(flags + expression, name) is not None
    assert matches("targets", flags + expression, name, search) == expected
    most, expressions._MOST_WAYS = expressions._MOST_WAYS, 0  # so that `re` gets nothing
    try:
        assert matches("targets", flags + expression, name, search) == expected
    finally:
        expressions._MOST_WAYS = most


# As llm-compressor, GPTQModel and AutoRound write them.
_REAL = [
    (r".*lm_head", False), (r".*self_attn.(q|k|v|o)_proj$", True), (r".*\.layers\.(1[0-9]|2)\..*", True),
    (r"model\.layers\.[0-9]+\.(self_attn|mlp)\..*(q|k|v|gate|up)_proj$", True), (r"^(?!.*\bself_attn\b).*$", False),
    (r".*layers\.\d+\.mlp\.experts\.\d+\.(gate|up|down)_proj$", False), (r".*model\.layers.*self.*attn.*q.*proj.*", True),
]  # fmt: skip


@pytest.mark.parametrize("expression, found", _REAL)
def test_expressions_of_real_files_are_taken(expression, found):
    assert matches("targets", expression, "model.layers.17.self_attn.q_proj") == found


@pytest.mark.parametrize("expression, name", [
    (r"((model|m|.)+)+\d\d$", "model.layers.0.mlp.down_proj"), ("(a*)*b", "a" * 500), ("(a|a)+b", "a" * 60),
    ("(a?){200}b", "a" * 200), ("(a|aa)" * 60 + "b", "a" * 99), (".*a" * 20 + "b", "a" * 99), (r"(((a*b)*c)*d)*e", "aabcd" * 40),
    ("(a{0,65000}){0,65000}b", "a" * 99),
])  # fmt: skip
def test_expressions_that_backtrack_for_ever_have_an_answer(expression, name):
    start = time.process_time()
    assert not matches("targets", expression, name)
    assert not matches("targets", expression, name, search=True)
    assert time.process_time() - start < 5


@pytest.mark.parametrize("expression, why", [
    ("(", "missing"), ("a{99999999999999}", "repetition number is too large"), ("(" * 5000 + ")" * 5000, "recursion"),
    (r"(a+)+\1", "groupref is not taken"), ("(?s:a+)+", "subpattern is not taken"), (r"(?m)(a+)+", "flags other than"),
    ("(a*b*)*" * 400 + "c", "it would take too long"),
])  # fmt: skip
def test_what_is_no_expression_or_cannot_be_bounded_is_named(expression, why):
    with pytest.raises(ValueError, match=f"^targets: expected a regular expression, got .*{why}"):
        matches("targets", expression, "ab" * 60)
