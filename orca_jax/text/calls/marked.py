"""Calls between markers: how those of a dialect are read, and their grammar."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from re import Pattern

from orca_jax.text.calls import forms
from orca_jax.text.calls.braces import BracedCall
from orca_jax.text.calls.forms import Form, Offer
from orca_jax.text.calls.json_call import JsonCall, NamedCall
from orca_jax.text.calls.members import PythonCall, TaggedCall, Tags
from orca_jax.text.calls.offered import Schemas, Tools, parameters_of, tool_name
from orca_jax.text.calls.parser import CallParser, CallReader, Node, Syntax
from orca_jax.text.calls.parts import ToolParser
from orca_jax.values.request import StructuredOutput

type ReaderOf = Callable[[Schemas], CallReader]
"""Makes the reader of one call."""


@dataclass(frozen=True)
class MarkedCalls:
    """Calls between markers.

    Attributes:
        syntax: around the calls.
        readers: of a call, by the names in the syntax.
        form: the grammar of the calls of some tools.
    """

    syntax: Syntax
    readers: Mapping[str, ReaderOf]
    form: Callable[[Offer], Form]

    def parser(self, tools: Tools) -> ToolParser:
        """Return a parser for the calls that a model generates by itself."""
        schemas = {tool_name(tool): parameters_of(tool) for tool in tools}
        return CallParser(self.syntax, lambda kind: self.readers[kind](schemas))

    def constraint(self, offer: Offer, answer: StructuredOutput | None) -> StructuredOutput:
        """Return the constraint on calls or an answer, which is free text without a format.

        Raises:
            CannotEnforceError: the dialect has no grammar for a strict tool.
        """
        form = self.form(offer)
        return form.in_text(offer) if answer is None else form.or_format(offer, answer)


def json_between(start: str, end: str) -> MarkedCalls:
    """JSON objects, each between two markers."""
    return MarkedCalls(
        Syntax({start: "json"}, after={"json": {end: "end"}}),
        {"json": partial(JsonCall, stop=end)},
        partial(forms.in_json, start=start, end=end),
    )


def json_alone(tag: str) -> MarkedCalls:
    """JSON objects with semicolons between them; a tag may stand before the first."""
    return MarkedCalls(
        Syntax({}, {tag: "json", "": "json"}, {"json": {";": "json"}}),
        {"json": JsonCall},
        partial(forms.plain_json, tag=tag),
    )


def json_list(start: str, end: str = "", *, is_cohere: bool = False) -> MarkedCalls:
    """A marker and a list of JSON objects, perhaps with a marker after it."""
    after: Mapping[str, str] | str = {end: "end"} if end else "end"
    return MarkedCalls(
        Syntax({start: {"[": "json"}}, after={"json": {",": "json", "]": after}}),
        {"json": JsonCall},
        partial(forms.in_list, start=start, end=end, is_cohere=is_cohere),
    )


def named_in_section(
    section: tuple[str, str],
    call: tuple[str, str],
    head: Pattern[str],
    form: Callable[[Offer], str],
    *,
    fence: str = "",
) -> MarkedCalls:
    """Calls with a marker on both sides of each, and one before and after all of them.

    Args:
        section: the markers around all calls.
        call: the markers around one.
        head: the text of a call before its arguments.
        form: the text between the markers of one call in Lark, with NAME and @arguments.
        fence: a text that may stand after the arguments.
    """
    start, end = section
    begin, stop = call
    further: Node = {begin: "named", end: "end"}
    after: dict[str, Node] = {stop: further}
    if fence:
        after[fence] = {stop: further}

    def whole(offer: Offer) -> Form:
        one = f"{offer.mark(begin)} {form(offer)} {offer.mark(stop)}"
        return forms.in_section(offer, start, one, end)

    return MarkedCalls(
        Syntax({start: {begin: "named"}}, after={"named": after}),
        {"named": partial(NamedCall, head=head)},
        whole,
    )


def tagged(outer: str, tags: Tags, *, may_lack_outer: bool = False) -> MarkedCalls:
    """Calls in tags, with a tag before all of them and one after, which may be missing."""
    markers: dict[str, Node] = {outer: {tags.first: "tagged"}}
    if may_lack_outer:
        markers[tags.first] = "tagged"
    return MarkedCalls(
        Syntax(markers, after={"tagged": {tags.ends[-1]: "end", tags.first: "tagged"}}),
        {"tagged": partial(TaggedCall, tags=tags)},
        partial(forms.tagged, outer=outer, tags=tags, may_lack_outer=may_lack_outer),
    )


def keyed(start: str, tags: Tags) -> MarkedCalls:
    """Calls with a tag around each key and each value."""
    return MarkedCalls(
        Syntax({start: "tagged"}),
        {"tagged": partial(TaggedCall, tags=tags)},
        partial(forms.keyed, start=start, tags=tags),
    )


def braced(start: str, end: str, quote: str) -> MarkedCalls:
    """call:name{key:value,...}, with `quote` on both sides of each text."""
    return MarkedCalls(
        Syntax({start: {"call:": "braced"}}, after={"braced": {end: "end"}}),
        {"braced": partial(BracedCall, quote=quote)},
        partial(forms.braced, start=start, end=end),
    )


def python_list(start: str, end: str) -> MarkedCalls:
    """A list of calls as in Python between two markers, anywhere in the text."""
    return MarkedCalls(
        Syntax({start: {"[": "python"}}, after={"python": {",": "python", "]": {end: "end"}}}),
        {"python": PythonCall},
        partial(forms.in_python, start=start, end=end, marks=('"["', '", "', '"]"')),
    )


def python_lines(start: str, end: str) -> MarkedCalls:
    """Calls as in Python on lines between two markers."""
    return MarkedCalls(
        Syntax({start: "python"}, after={"python": {end: "end", "": "python"}}),
        {"python": PythonCall},
        partial(forms.in_python, start=start, end=end, marks=('"\\n"?', '"\\n"', '"\\n"?')),
    )
