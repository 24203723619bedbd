"""Writes the flags of the server into docs/flags.md, and vLLM's into docs/vllm.md: `python scripts/flags_page.py`."""

import argparse
import dataclasses
import json
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from lab.pages.markdown import Page, between, escaped, table
from orca_jax.flags.habits import tables
from orca_jax.flags.vllm import SAME, own_values, refused_flags, taken_flags
from orca_jax.serve.args import make_parser
from orca_jax.values.config import EngineConfig
from orca_jax.values.request import SamplingParams

ROOT = Path(__file__).resolve().parents[1]
VLLM_NAMES = ROOT / "tests" / "flags" / "vllm_0.32.0.json"
HERE = "taken, as here"
VERDICTS = ("what happens", "names")
BEGIN = "<!-- begin: python scripts/flags_page.py -->"
END = "<!-- end: python scripts/flags_page.py -->"


def actions() -> list[tuple[str, list[argparse.Action]]]:
    """Return the flags of the server by groups, each with its title."""
    found = [
        (group.title or "", list(group._group_actions)) for group in make_parser()._action_groups
    ]
    return [(title, flags) for title, flags in found if any(flag.option_strings for flag in flags)]


def flag_list() -> str:
    """Return a table of the flags of each group: names and meaning. Habits from other programs follow."""
    parts = []
    for title, flags in actions():
        rows = [_row(flag) for flag in flags if flag.option_strings]
        parts.append(_part(f"### {title[:1].upper()}{title[1:]}", ("flag", "meaning"), rows))
    return "".join([*parts, habit_lists()])


def vllm_lists() -> str:
    """Return what happens to each flag and keyword of a version of vLLM."""
    names = json.loads(VLLM_NAMES.read_text(encoding="utf-8"))
    fields = {field.name for field in dataclasses.fields(EngineConfig)} | {"skip_tokenizer_init"}
    flags = [f"--{name}" for name in (*names["serve"], *names["removed"])]
    return "".join(
        [
            _part(
                f"## Flags of `vllm serve` {names['version']}, and earlier ones",
                VERDICTS,
                _verdicts(flags, make_parser()._option_string_actions, refused_flags()),
            ),
            _part(
                "## Values of these flags that are taken and named",
                ("flag", "values", "what it means here"),
                _values(),
            ),
            _part(
                "## Arguments of `LLM`",
                VERDICTS,
                _verdicts(names["LLM"], fields, refused_flags()),
            ),
            _part(
                "## Arguments of `SamplingParams`",
                VERDICTS,
                _verdicts(
                    names["SamplingParams"],
                    SamplingParams.__dataclass_fields__,
                    SamplingParams._refused,
                ),
            ),
        ]
    )


def _part(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return f"\n{title}\n\n{table(head, rows)}"


def _values() -> Iterable[Sequence[str]]:
    for name, row in own_values().items():
        flag = f"`method` of `--{name}`" if name == "speculative-config" else f"`--{name}`"
        yield flag, ", ".join([f"`{value}`" for value in row["values"]]), row["reason"]


def habit_lists() -> str:
    """Return what happens to flags of llama.cpp, and what to run in the place of other programs' commands."""
    found = tables()
    rows = defaultdict(list)
    for flag, row in found["same"].items():
        rows["the same as " + " or ".join(f"`{name}`" for name in row["same"])].append(f"`{flag}`")
    for what, name in (("taken and named", "no_effect"), ("refused", "refused")):
        for reason, words in found[name].items():
            rows[f"{what}: {reason}"] += [f"`{word.rstrip('=*')}`" for word in words.split()]
    flags = [(what, ", ".join(names)) for what, names in rows.items()]
    commands = [(f"`{name}`", hint) for name, hint in found["commands"].items()]
    return _part("## Flags of llama.cpp", ("what happens", "flags"), flags) + _part(
        "## Commands of other programs", ("command", "here"), commands
    )


def verdict(name: str, own: Collection[str], refused: Any) -> str:
    """Return what happens to a flag or keyword of vLLM. Raises KeyError if it has no row."""
    plain = name.removeprefix("--").replace("_", "-")
    same = SAME.get(f"--{plain}")
    if name in own:
        return HERE
    if same is not None:
        return "taken, under another name"
    if known := taken_flags().get(plain):
        values = (
            ""
            if known.only is None
            else f" with {' or '.join(f'`{one}`' for one in known.only)}, else refused"
        )
        return f"taken and named{values}: {known.reason}"
    return f"refused: {refused.get(name) or refused[plain]}"


def _verdicts(
    names: Iterable[str], own: Collection[str], refused: Any
) -> Iterable[tuple[str, str]]:
    rows = defaultdict(list)
    for name in names:
        shown = f"`{name}` (`{SAME[name]}`)" if name in SAME and name not in own else f"`{name}`"
        rows[verdict(name, own, refused)].append(shown)
    order = sorted(
        rows, key=lambda what: (what.startswith("refused"), what.startswith("taken and"), what)
    )
    return [(what, ", ".join(sorted(rows[what]))) for what in order]


def _row(flag: argparse.Action) -> tuple[str, str]:
    names = ", ".join(f"`{name}`" for name in flag.option_strings)
    values = f": {', '.join(f'`{value}`' for value in flag.choices)}" if flag.choices else ""
    return names, escaped(f"{(flag.help or '') % vars(flag)}{values}")


def _page(name: str, content: Callable[[], str]) -> Page:
    def renew(text: str) -> str:
        return between(text, BEGIN, END, f"\n{content()}\n")

    return Page(ROOT / "docs" / name, renew, "python scripts/flags_page.py")


PAGES = (_page("flags.md", flag_list), _page("vllm.md", vllm_lists))

if __name__ == "__main__":
    for page in PAGES:
        page.write()
