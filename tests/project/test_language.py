"""Plain English in docstrings, comments and messages, by rules that a program can check.

CONTRIBUTING.md has the reasons. Each finding is `file:line: sentence`.
"""

import ast
import inspect
import io
import re
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.project.source import SourceFile, python_files

MAX_KNOTTED = 0.15  # of the sentences in docstrings
MAX_ARGS = 0.02  # of the lines below "Args:" may begin with a preposition
MAX_HANGING = 0.04  # of the sentences in docstrings
MIN_WORDS = 3  # of a docstring
SHOWN = 40  # findings of a share that is too high

Finding = tuple[int, str]
"""A line of the file and the text there."""

KNOT = re.compile(r"\b(which|who|whom|whose|whoever|what|whatever|where|wherever|that)\b", re.I)
PEOPLE = re.compile(
    r"\b(nobody|somebody|whoever|everybody|anybody|no one|someone|everyone|anyone)\b", re.I
)
OPENING = re.compile(r"(What|Who|Whose|How|Where|Which|From|Whether)\b")
# English has it in "there is no page", and where the "no" belongs to a comparison.
IS_NO = re.compile(
    r"(?<!there )\b(is|are) no (?!longer\b|(more|fewer|less|larger|smaller|later) than\b)[a-z]",
    re.I,
)

PREPOSITION = re.compile(
    r"(of|for|in|on|at|by|from|to|with|without|as|per|between|within|after|before|under|above|below|beside|than|like|"
    r"during|also)\b",
    re.I,
)
ARGUMENT = re.compile(r"(?m)^ {4}\*{0,2}\w+: *(?=\S)")
# A word that points at a noun elsewhere: the reader has to guess it.
HANGING = re.compile(
    r"\b(those|likewise|such(?! as)|the ones?|of (its|their) own)\b"
    r"|\b(the same|these)(?= (of|in|with|that|which|for|from|by|on|to|are|is|have|has|at|without)\b|[.,;:)]|$)",
    re.I,
)

PACKAGE = python_files("orca_jax")
SCRIPTS = python_files("scripts", "lab")


def docstrings(file: SourceFile) -> Iterator[Finding]:
    """Every docstring, also of a variable, with the line of its beginning."""
    for node in file.nodes:
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            yield node.lineno, inspect.cleandoc(node.value.value)


def comments(file: SourceFile) -> Iterator[Finding]:
    """Every comment, without its mark."""
    for token in tokenize.generate_tokens(io.StringIO(file.text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("#! ")


def messages(file: SourceFile) -> Iterator[Finding]:
    """Every string with a blank in it that is not a docstring; the values of an f-string are an `x` each."""
    inner = {id(child) for node in file.nodes for child in _texts_inside(node)}
    for node in file.nodes:
        if id(node) in inner:
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        elif isinstance(node, ast.JoinedStr):
            text = "".join(
                str(part.value) if isinstance(part, ast.Constant) else "x" for part in node.values
            )
        else:
            continue
        if " " in text.strip():
            yield node.lineno, text


def _texts_inside(node: ast.AST) -> list[ast.expr]:
    """Constants that are not messages of their own: a docstring, and the parts of an f-string and of its formats."""
    if isinstance(node, ast.JoinedStr):
        return [
            *node.values,
            *(
                part.format_spec
                for part in node.values
                if isinstance(part, ast.FormattedValue) and part.format_spec
            ),
        ]
    return [node.value] if isinstance(node, ast.Expr) else []


def sentences(line: int, text: str) -> Iterator[Finding]:
    """The sentences of a docstring that begins at `line`: without headings, and with an `x` for code in backticks."""
    text = re.sub(r"`[^`]*`", lambda code: "x" + "\n" * code[0].count("\n"), text)
    text = re.sub(r"(?m)^[ \t]*(Args|Returns|Raises|Yields|Attributes):[ \t]*$", "", text)
    end = 0
    for sentence in re.split(r"(?<=[.!?:;])\s+|\n\s*\n", text):
        begin = text.index(sentence, end)
        end = begin + len(sentence)
        begin += len(sentence) - len(sentence.lstrip())
        if sentence.strip():
            yield line + text.count("\n", 0, begin), " ".join(sentence.split())


def documented(file: SourceFile) -> Iterator[Finding]:
    """The sentences of all docstrings."""
    for line, text in docstrings(file):
        yield from sentences(line, text)


def arguments(file: SourceFile) -> Iterator[Finding]:
    """The texts of all lines below "Args:" and "Attributes:", each from its first word on."""
    for line, text in docstrings(file):
        for heading in re.finditer(r"(?m)^(Args|Attributes):\n", text):
            rest = text[heading.end() :]
            block = re.split(r"(?m)^(?=\S)", rest)[0]
            for found in ARGUMENT.finditer(block):
                before = len(text) - len(rest) + found.start()
                yield line + text.count("\n", 0, before), block[found.end() :].partition("\n")[0]


def num_knots(sentence: str) -> int:
    """The number of relative pronouns in a sentence."""
    return len(KNOT.findall(sentence))


def people(text: str) -> list[str]:
    """The pronouns for people in a text."""
    return PEOPLE.findall(" ".join(text.split()))


def is_no(text: str) -> bool:
    """True for "is no <noun>", except in phrases that are English."""
    return IS_NO.search(" ".join(text.split())) is not None


def found_in(
    files: list[SourceFile],
    texts: Callable[[SourceFile], Iterator[Finding]],
    rule: Callable[[str], object],
) -> list[str]:
    """`file:line: text` of all texts that break a rule."""
    return [
        f"{file}:{line}: {' '.join(text.split())}"
        for file in files
        for line, text in texts(file)
        if rule(text)
    ]


def listed(found: list[str]) -> str:
    return "\n" + "\n".join(found)


@pytest.mark.parametrize("files", [PACKAGE, SCRIPTS], ids=["orca_jax", "scripts"])
def test_few_sentences_are_knotted(files: list[SourceFile]) -> None:
    every = [
        (num_knots(sentence), f"{file}:{line}: {sentence}")
        for file in files
        for line, sentence in documented(file)
        if len(sentence.split()) >= MIN_WORDS  # the others are headings and crumbs
    ]
    knotted = [found for knots, found in sorted(every, reverse=True) if knots]
    share = len(knotted) / len(every)
    assert share <= MAX_KNOTTED, (
        f"{share:.1%} of {len(every)} sentences have relative pronouns; the worst:"
        + listed(knotted[:SHOWN])
    )


def test_arguments_are_explained_by_a_noun() -> None:
    every = [(f"{file}:{line}: {text}", text) for file in PACKAGE for line, text in arguments(file)]
    found = [shown for shown, text in every if PREPOSITION.match(text)]
    assert len(every) > 900 and len(found) / len(every) <= MAX_ARGS, listed(found)


def test_few_sentences_hang_on_a_noun_elsewhere() -> None:
    every = [
        (f"{file}:{line}: {text}", text) for file in PACKAGE for line, text in documented(file)
    ]
    found = [shown for shown, text in every if HANGING.search(text)]
    share = len(found) / len([text for _, text in every if len(text.split()) >= MIN_WORDS])
    assert share <= MAX_HANGING, f"{share:.1%} of the sentences; some:" + listed(found[:SHOWN])


@pytest.mark.parametrize(
    "texts", [documented, comments, messages], ids=["docstrings", "comments", "messages"]
)
def test_data_are_not_people(texts: Callable[[SourceFile], Iterator[Finding]]) -> None:
    found = found_in(PACKAGE + SCRIPTS, texts, people)
    assert not found, "say 'no request', 'the caller', 'each member':" + listed(found)


def test_docstrings_are_not_stubs() -> None:
    found = found_in(PACKAGE + SCRIPTS, docstrings, lambda text: len(text.split()) < MIN_WORDS)
    assert not found, f"docstrings under {MIN_WORDS} words; write a sentence, or none:" + listed(
        found
    )


def test_modules_begin_with_a_noun_or_a_verb() -> None:
    texts = [(file, ast.get_docstring(file.tree) or "") for file in PACKAGE + SCRIPTS]
    found = [f"{file}:1: {text.splitlines()[0]}" for file, text in texts if OPENING.match(text)]
    assert not found, listed(found)


def test_messages_say_is_not() -> None:
    found = found_in(PACKAGE + SCRIPTS, messages, is_no)
    assert not found, "say 'is not a <noun>':" + listed(found)


SAMPLE = '''"""A page.

The page that `who()` made. It is short:
and ends
here.

Args:
    one: a number, which counts.
"""

LIMIT = 3  # nobody reads this


class Page:
    """Keys
    and values."""

    def refuse(self, name):
        raise ValueError(f"{name!r:>{LIMIT} } is no {self}; " "name somebody else")

    def work(self):
        return "key"


LIST = Page
"""Not a page."""
'''


@pytest.fixture
def sample() -> SourceFile:
    file = SourceFile(Path("sample.py"))
    file.__dict__["text"] = SAMPLE  # as if it had been read
    return file


def test_sentences_of_a_sample(sample: SourceFile) -> None:
    (first, text), *others = docstrings(sample)
    assert sorted(others) == [(15, "Keys\nand values."), (26, "Not a page.")]
    assert list(sentences(first, text)) == [
        (1, "A page."),
        (3, "The page that x made."),
        (3, "It is short:"),
        (4, "and ends here."),
        (8, "one:"),
        (8, "a number, which counts."),
    ]
    assert [num_knots(sentence) for _, sentence in documented(sample)] == [0, 1, 0, 0, 0, 1, 0, 0]


def test_comments_and_messages_of_a_sample(sample: SourceFile) -> None:
    assert list(comments(sample)) == [(11, "nobody reads this")]
    assert list(messages(sample)) == [(19, "x is no x; name somebody else")]
    assert found_in([sample], messages, is_no) == [f"{sample}:19: x is no x; name somebody else"]
    assert found_in([sample], messages, people) == found_in([sample], messages, is_no)
    assert found_in([sample], documented, people) == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Nobody waits, and no\none asks.", ["Nobody", "no one"]),
        ("someone, everyone, anyone; whoever", ["someone", "everyone", "anyone", "whoever"]),
        ("somebody and everybody and anybody", ["somebody", "everybody", "anybody"]),
        ("No request waits, and none of them is long.", []),
        ("The body of a request.", []),
    ],
)
def test_people(text: str, found: list[str]) -> None:
    assert people(text) == found


def test_arguments_of_a_sample(sample: SourceFile) -> None:
    assert list(arguments(sample)) == [(8, "a number, which counts.")]
    assert PREPOSITION.match("of the decoder.") and not PREPOSITION.match("the decoder.")


@pytest.mark.parametrize(
    "text", ["It has those of x.", "a such thing", "It has one of its own.", "x is the same."]
)
def test_hanging_sentences(text: str) -> None:
    assert HANGING.search(text)


@pytest.mark.parametrize(
    "text", ["a file such as x", "the same page", "these pages", "one of them"]
)
def test_sentences_that_stand(text: str) -> None:
    assert not HANGING.search(text)


@pytest.mark.parametrize(
    "text", ["x is no directory", "they are no\n integers", "this is no more a file", "is no x"]
)
def test_is_no(text: str) -> None:
    assert is_no(text)


@pytest.mark.parametrize(
    "text",
    [
        "there is no weather",
        "There are no pages",
        "the model is no longer served",
        "is no more than 3",
        "are no later than now",
        "is not a directory",
        "it has no pages",
        "this no",
    ],
)
def test_is_not(text: str) -> None:
    assert not is_no(text)


@pytest.mark.parametrize(
    "word", ["What", "Who", "Whose", "How", "Where", "Which", "From", "Whether"]
)
def test_openings(word: str) -> None:
    assert OPENING.match(f"{word} a page holds.")
    assert not OPENING.match(f"The rest, {word} a page holds.")
    assert not OPENING.match(f"{word}ever.")
