"""Functions of the composition root take what they read: values of other modules and settings are not handed around."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cache

from tests.project.source import ROOT, python_files, source_file

FOLDER = "orca_jax/assembly"
MAX_IMPORTS = 20  # of this package, in the main module
ENTRIES = {"build_scheduling: model", "arrange: platform"}
"""Entries for callers elsewhere, which have the whole value."""

Function = ast.FunctionDef | ast.AsyncFunctionDef
Fields = frozenset[str]


@cache
def classes() -> dict[str, ast.ClassDef]:
    """The classes of the folder and of all files from which it imports, by their names, which are unique."""
    own = python_files(FOLDER)
    imports = (
        node
        for file in own
        for node in file.nodes
        if isinstance(node, ast.ImportFrom) and node.module
    )
    places = {
        ROOT.joinpath(*node.module.split(".")).with_suffix(".py") for node in imports if node.module
    }
    others = [source_file(path.relative_to(ROOT)) for path in places if path.is_file()]
    nodes = (node for file in (*own, *others) for node in file.tree.body)
    return {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}


@cache
def functions() -> dict[str, list[Function]]:
    """The functions and methods of the folder by their names."""
    found = defaultdict(list)
    for file in python_files(FOLDER):
        for node in file.functions():
            # a method that does nothing reads nothing
            if len(node.body) > 1 or ast.get_docstring(node) is None:
                found[node.name].append(node)
    return found


def is_value(node: ast.ClassDef) -> bool:
    """True for dataclasses, named tuples and messages."""
    names = {ast.unparse(base).split(".")[-1] for base in node.bases}
    bases = [classes()[name] for name in names if name in classes()]
    made = any("dataclass" in ast.unparse(each) for each in node.decorator_list)
    return made or bool(names & {"NamedTuple", "Struct"}) or any(is_value(base) for base in bases)


def fields_of(kind: str) -> Fields:
    """The fields of a value; none for another class."""
    node = classes().get(kind)
    if node is None or not is_value(node):
        return frozenset()
    own = (each for each in node.body if isinstance(each, ast.AnnAssign))
    return frozenset(each.target.id for each in own if isinstance(each.target, ast.Name))


def kind_of(annotation: ast.expr | None) -> str:
    """The class of a parameter, without `| None`; empty if it is no name."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        annotation = ast.parse(annotation.value, mode="eval").body
    if isinstance(annotation, ast.BinOp):
        return kind_of(annotation.left)
    return annotation.id if isinstance(annotation, ast.Name) else ""


def parameters(function: Function) -> list[ast.arg]:
    own = function.args
    return [each for each in (*own.posonlyargs, *own.args, *own.kwonlyargs) if each.arg != "self"]


def argument_of(call: ast.Call, name: ast.Name, function: Function) -> ast.arg | None:
    """The parameter of `function` that gets `name` in a call."""
    own = parameters(function)
    if name in call.args:
        index = call.args.index(name)
        return own[index] if index < len(own) else None
    keyword = next((each.arg for each in call.keywords if each.value is name), None)
    return next((each for each in own if each.arg == keyword), None)


def reads(
    function: Function, parameter: str, kind: str, seen: frozenset[tuple[str, str]] = frozenset()
) -> Fields:
    """The fields of a parameter that a function reads; all fields if it hands the value to something else."""
    key, fields = (function.name, parameter), fields_of(kind)
    if key in seen:
        return frozenset()
    found: set[str] = set()
    parents = {
        id(child): node for node in ast.walk(function) for child in ast.iter_child_nodes(node)
    }
    for name in ast.walk(function):
        if not isinstance(name, ast.Name) or name.id != parameter:
            continue
        parent = parents[id(name)]
        parent = parents[id(parent)] if isinstance(parent, ast.keyword) else parent
        if isinstance(parent, ast.Attribute):
            found |= {parent.attr} & fields or read_by(kind, parent.attr, seen | {key})
        elif isinstance(parent, ast.Call):
            found |= read_by_callee(parent, name, kind, seen | {key})
        # not just asked for None
        elif not isinstance(parent, ast.Compare | ast.IfExp | ast.If | ast.BoolOp):
            return fields
    return frozenset(found)


def read_by(kind: str, member: str, seen: frozenset[tuple[str, str]]) -> Fields:
    """The fields that a method or property reads of its own value."""
    methods = (
        each for each in classes()[kind].body if isinstance(each, Function) and each.name == member
    )
    return frozenset().union(*(reads(each, "self", kind, seen) for each in methods))


def read_by_callee(
    call: ast.Call, name: ast.Name, kind: str, seen: frozenset[tuple[str, str]]
) -> Fields:
    """The fields that the called function of this folder reads; all for functions elsewhere and for new values."""
    callee = call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")
    taken = [(each, argument_of(call, name, each)) for each in functions().get(callee, [])]
    known = [
        reads(each, argument.arg, kind, seen) for each, argument in taken if argument is not None
    ]
    return frozenset().union(*known) if known else fields_of(kind)


def faults() -> Iterator[str]:
    for function in (each for same in functions().values() for each in same):
        for parameter in parameters(function):
            kind = kind_of(parameter.annotation)
            fields = fields_of(kind)
            read = reads(function, parameter.arg, kind) if fields else frozenset[str]()
            if 2 * len(read) < len(fields):
                yield f"{function.name}: {parameter.arg}"


def test_functions_take_values_of_which_they_read_half() -> None:
    """A function that takes more than it reads makes its callers build more, and its readers look further."""
    assert set(faults()) == ENTRIES


def test_the_main_module_has_few_imports() -> None:
    (main,) = [file for file in python_files(FOLDER) if file.path.name == "engine.py"]
    imported = {node.module for node in main.nodes if isinstance(node, ast.ImportFrom)}
    assert len({name for name in imported if name and name.startswith("orca_jax")}) <= MAX_IMPORTS
