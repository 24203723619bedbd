"""Every filter, test and global of the language of chat templates, in the process without rights to files.

Jinja and Python import some modules late, when the process cannot open files any more. Each name runs once.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from orca_jax.text.template import ChatTemplate
from orca_jax.text.template_worker import environment

ROWS: list[dict[str, Any]] = [{"name": "b", "n": 2, "ok": True}, {"name": "a", "n": 1, "ok": False}]
VALUES = {
    "rows": ROWS,
    "text": "Don't  fold this-line <b>é</b>\n\n  or that one",
    "pairs": {"z": 1, "a": [2, None]},
}
FILTERS = {
    "abs": "-3 | abs",
    "attr": "(pairs | attr('keys'))() | list",
    "batch": "range(5) | batch(2, 0) | list",
    "capitalize": "'aB c' | capitalize",
    "center": "'x' | center(5)",
    "count": "rows | count",
    "d": "nothing | d('x')",
    "default": "'' | default('x', true)",
    "dictsort": "pairs | dictsort(reverse=true)",
    "e": "text | e",
    "escape": "text | escape",
    "filesizeformat": "1234567 | filesizeformat(binary=true)",
    "first": "rows | first",
    "float": "'1.5' | float",
    "forceescape": "text | forceescape",
    "format": "'%s %05.1f' | format('x', 3)",
    "groupby": "rows | groupby('ok')",
    "indent": "text | indent(2, first=true)",
    "int": "'0x1f' | int(base=16)",
    "items": "pairs | items | list",
    "join": "rows | join(', ', attribute='name')",
    "last": "rows | last",
    "length": "text | length",
    "list": "'ab' | list",
    "lower": "text | lower",
    "map": "rows | map(attribute='n') | list",
    "max": "rows | max(attribute='n')",
    "min": "rows | min(attribute='n')",
    "pprint": "rows | pprint",
    "random": "[7] | random",
    "reject": "range(5) | reject('odd') | list",
    "rejectattr": "rows | rejectattr('ok') | list",
    "replace": "text | replace('t', 'T', 1)",
    "reverse": "'abc' | reverse",
    "round": "2.345 | round(2, 'floor')",
    "safe": "text | safe",
    "select": "range(5) | select('divisibleby', 2) | list",
    "selectattr": "rows | selectattr('n', 'gt', 1) | list",
    "slice": "range(5) | slice(2, 0) | list",
    "sort": "rows | sort(attribute='name')",
    "string": "rows | string",
    "striptags": "text | striptags",
    "sum": "rows | sum(attribute='n')",
    "title": '"don\'t stop" | title',
    "tojson": "rows | tojson(indent=2, separators=(',', ':'), sort_keys=true) ~ (text | tojson(ensure_ascii=true))",
    "trim": "'  x ' | trim ~ ('xax' | trim('x'))",
    "truncate": "text | truncate(12, killwords=true, end='…')",
    "unique": "['a', 'A', 'b'] | unique | list",
    "upper": "text | upper",
    "urlencode": "pairs | urlencode ~ (text | urlencode)",
    "urlize": "'see https://example.org/a?b=c or me@example.org' | urlize(20, nofollow=true, target='_blank')",
    "wordcount": "text | wordcount",
    "wordwrap": "text | wordwrap(8, break_long_words=false)",
    "xmlattr": "{'class': 'a b', 'id': none} | xmlattr",
}
TESTS = {
    "boolean": "true is boolean",
    "callable": "range is callable",
    "defined": "nothing is defined",
    "divisibleby": "6 is divisibleby 4",
    "eq": "1 is eq 1",
    "equalto": "1 is equalto 2",
    "escaped": "text | e is escaped",
    "even": "3 is even",
    "false": "false is false",
    "filter": "'wordwrap' is filter",
    "float": "1.0 is float",
    "ge": "1 is ge 1",
    "greaterthan": "1 is greaterthan 1",
    "gt": "2 is gt 1",
    "in": "'a' is in 'abc'",
    "integer": "1 is integer",
    "iterable": "rows is iterable",
    "le": "1 is le 1",
    "lessthan": "1 is lessthan 1",
    "lower": "'a' is lower",
    "lt": "1 is lt 2",
    "mapping": "pairs is mapping",
    "ne": "1 is ne 1",
    "none": "none is none",
    "number": "'1' is number",
    "odd": "3 is odd",
    "sameas": "none is sameas none",
    "sequence": "rows is sequence",
    "string": "text is string",
    "test": "'odd' is test",
    "true": "true is true",
    "undefined": "nothing is undefined",
    "upper": "'A' is upper",
    "!=": "[1, 2] | select('!=', 1) | list",
    "<": "[1, 2] | select('<', 2) | list",
    "<=": "[1, 2] | select('<=', 1) | list",
    "==": "[1, 2] | select('==', 2) | list",
    ">": "[1, 2] | select('>', 1) | list",
    ">=": "[1, 2] | select('>=', 1) | list",
}
GLOBALS = {
    "cycler": "cycler('a', 'b').next()",
    "dict": "dict(b=1, **pairs)",
    "joiner": "joiner('|') is callable",
    "lipsum": "lipsum(n=2, min=5, max=9, html=false) | wordcount > 9 and '<p>' in lipsum(n=1)",
    "namespace": "namespace(a=1).a",
    "range": "range(1, 9, 3) | list",
    "raise_exception": "raise_exception is callable",
    "strftime_now": "strftime_now('%Y %B %Z') | length > 5",
}
STATEMENTS = {
    "generation": "{% generation %}{{ text | wordwrap(9) }}{% endgeneration %}",
    "loopcontrols": "{% for n in range(9) %}{% if n == 2 %}{% continue %}{% elif n == 5 %}{% break %}{% endif %}"
    "{{ n }}{{ loop.cycle('a', 'b') }}{{ loop.changed(n) }}{% else %}none{% endfor %}",
    "macro": "{% macro call(x, y=2) %}{{ x }}{{ y }}{{ varargs }}{{ kwargs }}{{ caller() }}{% endmacro %}"
    "{% call call(1, 3, 4, z=5) %}inner{% endcall %}",
    "filter block": "{% filter wordwrap(9) | upper %}{{ text }}{% endfilter %}",
    "set block": "{% set made | trim %} {{ text }} {% endset %}{{ made }}{% set ns = namespace() %}"
    "{% set ns.x = 1 %}{{ ns.x }}",
    "autoescape": "{% autoescape true %}{{ text }}{% endautoescape %}",
    "with": "{% with a = 1 %}{{ a }}{% endwith %}",
    "recursive loop": "{% for x in [[1], [2]] recursive %}{{ x if x is integer else loop(x) }}{% endfor %}",
    "strings": "{{ 'a,b'.split(',') }}{{ '%s' % 1 }}{{ '{:>4}'.format(1) }}{{ '{a}'.format_map({'a': 1}) }}"
    "{{ text.encode('utf-8') }}{{ text.splitlines() }}{{ 'ß'.casefold() }}{{ 'x' * 3 }}{{ text[::-1] }}",
    "joiner": "{% set comma = joiner('|') %}{% for n in range(3) %}{{ comma() }}{{ n }}{% endfor %}",
    "undefined": "{{ nothing }}{{ nothing is defined }}",
}
CASES = {
    **{f"filter {name}": "{{ " + text + " }}" for name, text in FILTERS.items()},
    **{f"test {name}": "{{ " + text + " }}" for name, text in TESTS.items()},
    **{f"global {name}": "{{ " + text + " }}" for name, text in GLOBALS.items()},
    **STATEMENTS,
}


@pytest.fixture(scope="module")
def template() -> Iterator[ChatTemplate]:
    """One template for all cases; `case` chooses one."""
    branches = "".join(f"{{% elif case == {name!r} %}}{text}" for name, text in CASES.items())
    with ChatTemplate({"default": "{% if false %}" + branches + "{% endif %}"}, {}) as made:
        yield made


@pytest.mark.parametrize("name", CASES)
def test_the_process_renders_what_jinja_renders(template: ChatTemplate, name: str) -> None:
    rendered = template.render([], kwargs={**VALUES, "case": name})
    assert rendered == environment().from_string(CASES[name]).render(VALUES) and rendered


def test_no_name_is_left_out() -> None:
    made = environment()
    assert (set(made.filters), set(made.tests), set(made.globals)) == (
        set(FILTERS),
        set(TESTS),
        set(GLOBALS),
    )


def test_wordwrap_keeps_paragraphs(template: ChatTemplate) -> None:
    wrapped = template.render(
        [], kwargs={**VALUES, "text": "one two three\n\nfour", "case": "filter wordwrap"}
    )
    assert wrapped == "one two\nthree\n\nfour"
