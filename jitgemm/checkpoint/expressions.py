"""Regular expressions of a config, matched in bounded time: a config comes with a file that nobody need trust.

`re` tries the ways to match one after another, and `(a|a)+b` has 2^40 of them in 40 letters. Expressions that may have
many go to a matcher that follows the ends of all ways together: the same answer to the question whether there is one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from fnmatch import translate
from functools import cache, partial
from re import _constants as op  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import Any

_MOST_WAYS = 1_000_000
"""That `re` may have to try: some 20 ms."""
_MOST_PLACES = 200_000
"""Of a name that the matcher looks at, for all parts of an expression: some 100 ms. Those of real files take 500."""
_FLAGS = re.UNICODE | re.VERBOSE | re.IGNORECASE
_SIMPLE = (op.LITERAL, op.NOT_LITERAL, op.ANY, op.IN, op.AT, op.FAILURE)
_REPEATS = (op.MAX_REPEAT, op.MIN_REPEAT)
_GROUPS = (op.SUBPATTERN, op.ASSERT, op.ASSERT_NOT)


def matches(setting: str, expression: str, name: str, search: bool = False) -> bool:
    """Whether `re.match`, or with `search` `re.search`, finds the expression in a name. Raises ValueError, naming the
    setting, for one that is none, or that could take long and refers back to its groups or takes too long indeed."""
    try:
        parsed, pattern, factor, power = _known(expression)
        if factor * (len(name) + 1) ** (power + search) <= _MOST_WAYS:
            return (pattern.search if search else pattern.match)(name) is not None
        if parsed.state.flags & ~_FLAGS:
            raise _Unsupported("flags other than i and x are not taken")
        matcher = _Matcher(name, bool(parsed.state.flags & re.IGNORECASE))
        return bool(matcher.ends(parsed, range(search * len(name) + 1)))
    except (re.error, OverflowError, RecursionError, _Unsupported) as error:
        shown = expression if len(expression) < 200 else expression[:200] + "..."
        raise ValueError(f"{setting}: expected a regular expression, got {shown!r}: {error}") from None


def patterns(setting: str, rules: Any) -> list[Callable[[str], Any]]:
    """Of rules that mean layers: by an expression behind "re:", a pattern of names, or whole parts of them.

    Raises ValueError for other rules.
    """
    if not isinstance(rules, (list, tuple)) or not all(isinstance(rule, str) for rule in rules):
        raise ValueError(f"{setting}: expected a list of names, got {rules!r}")
    return [_named(setting, rule) for rule in rules]


@cache
def _named(setting: str, rule: str) -> Callable[[str], Any]:
    if not rule.startswith("re:"):
        return re.compile(rf"(.*\.)?{re.escape(rule.strip('.'))}(\.|$)|{translate(rule)}").match
    check = partial(matches, setting, rule.removeprefix("re:"))
    check("")  # which raises for what is no expression
    return check


class _Unsupported(Exception):
    """An expression that `re` knows and the matcher does not take."""


@cache
def _known(expression: str) -> tuple[Any, re.Pattern[str], int, int]:
    parsed = _parser.parse(expression)
    return parsed, re.compile(expression), *_ways(parsed)


def _ways(nodes: Iterable[tuple[Any, Any]]) -> tuple[int, int]:
    """(factor, power): factor * (length + 1) ** power is no less than the ways to match parts in a name."""
    factor, power = 1, 0
    for code, value in nodes:
        if code in _REPEATS:
            least, most, body = value
            inner, exponent = _ways(body)
            if (inner, exponent) != (1, 0) and most > 1:
                return 1, 1_000  # ways of ways
            factor, power = factor * (inner + 1 if most == 1 else 1), power + exponent + (most > 1 and most != least)
        elif code in _SIMPLE:
            continue
        else:
            parts = value[1] if code is op.BRANCH else [value[-1]] if code in _GROUPS else []
            if not parts:
                return 1, 1_000
            ways = [_ways(way) for way in parts]
            factor, power = factor * sum(way for way, _ in ways), power + max(way for _, way in ways)
    return factor, power


class _Matcher:
    """A name, and how many of its places have been looked at."""

    def __init__(self, name: str, any_case: bool):
        self._name, self._any_case, self._looked_at = name, any_case, 0

    def ends(self, nodes: Iterable[tuple[Any, Any]], starts: Iterable[int]) -> set[int]:
        """Where matches of consecutive parts end that begin at one of these places."""
        places = set(starts)
        for code, value in nodes:
            self._looked_at += len(places) + 1
            if self._looked_at > _MOST_PLACES:
                raise _Unsupported("it would take too long")
            places = self._after(code, value, places)
        return places

    def _after(self, code: Any, value: Any, places: set[int]) -> set[int]:
        name = self._name
        if code in _SIMPLE[:4]:
            return {at + 1 for at in places if at < len(name) and self._is(code, value, name[at])}
        if code is op.AT:
            return {at for at in places if self._stands(value, at)}
        if code is op.BRANCH:
            return set[int]().union(*(self.ends(branch, places) for branch in value[1]))
        if code is op.SUBPATTERN and not (value[1] or value[2]):  # which add and remove flags
            return self.ends(value[3], places)
        if code in _REPEATS:
            least, most, body = value
            return self._repeated(least, most, body, places)
        if code in _GROUPS[1:]:
            back = value[1].getwidth()[0] if value[0] < 0 else 0
            return {
                at for at in places
                if (at >= back and bool(self.ends(value[1], [at - back]))) == (code is op.ASSERT)
            }  # fmt: skip
        if code is op.FAILURE:
            return set()
        raise _Unsupported(f"{str(code).lower()} is not taken")

    def _repeated(self, least: int, most: int, body: Any, places: set[int]) -> set[int]:
        for _ in range(min(least, 2 * len(self._name) + 2)):  # by then only places that repeat themselves are left
            places = self.ends(body, places)
        reached, new, most = set(places), places, most - least
        while new and most:
            new, most = self.ends(body, new) - reached, most - 1
            reached |= new
        return reached

    def _is(self, code: Any, value: Any, letter: str) -> bool:
        if code is op.ANY:
            return letter != "\n"
        letters = {letter, letter.lower(), letter.upper()} if self._any_case else {letter}
        members = value if code is op.IN else [(op.LITERAL, value)]
        out = code is op.NOT_LITERAL or (code is op.IN and members[0][0] is op.NEGATE)
        return any(_in(kind, each, one) for kind, each in members for one in letters) != out

    def _stands(self, where: Any, at: int) -> bool:
        name = self._name
        if where in (op.AT_BEGINNING, op.AT_BEGINNING_STRING):
            return at == 0
        if where in (op.AT_END, op.AT_END_STRING):
            return at == len(name) or (where is op.AT_END and name[at:] == "\n")
        inside = [0 <= index < len(name) and _in(op.CATEGORY, op.CATEGORY_WORD, name[index]) for index in (at - 1, at)]
        return (inside[0] != inside[1]) == (where is op.AT_BOUNDARY)


def _in(code: Any, value: Any, letter: str) -> bool:
    if code is op.LITERAL:
        return ord(letter) == value
    if code is op.RANGE:
        return value[0] <= ord(letter) <= value[1]
    if code is op.CATEGORY:
        category = str(value).removeprefix("CATEGORY_")
        member = {
            "DIGIT": letter.isdecimal(), "SPACE": letter.isspace(), "WORD": letter.isalnum() or letter == "_",
        }[category.removeprefix("NOT_")]  # fmt: skip
        return member != category.startswith("NOT_")
    return False  # NEGATE
