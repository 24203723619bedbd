"""Tables of the facts that a class from outside sees, from the docstrings of `orca_jax.policy`."""

import inspect
import re

from lab.pages.markdown import escaped, wide_table
from orca_jax.policy import KeptSpan, PolicyView, RequestView

_ROW = re.compile(r"^ {4}(\w+): (.+?)(?=^ {4}\w+: |\Z)", re.MULTILINE | re.DOTALL)


def job() -> str:
    """The facts of a job."""
    return attributes(RequestView)


def view() -> str:
    """The facts of a decision."""
    return attributes(PolicyView)


def span() -> str:
    """The facts of a span of kept pages."""
    return attributes(KeptSpan)


def attributes(kind: type) -> str:
    """The attributes of a class as its docstring has them, as a table.

    Raises:
        KeyError: the docstring has no attributes.
    """
    _, found, text = (inspect.getdoc(kind) or "").partition("Attributes:\n")
    if not found:
        raise KeyError(kind.__name__)
    rows = [[f"`{name}`", escaped(words).strip().rstrip(".")] for name, words in _ROW.findall(text)]
    return wide_table(["attribute", "meaning"], rows)
