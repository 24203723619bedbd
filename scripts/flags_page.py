"""Writes the flags of the server into docs/flags.md, and vLLM's into docs/vllm.md: `python scripts/flags_page.py`."""

import argparse
import dataclasses
import json
from collections import defaultdict
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from orca_jax.flags.habits import tables
from orca_jax.flags.vllm import SAME, own_values, refused_flags, taken_flags
from orca_jax.serve.args import make_parser
from orca_jax.values.config import EngineConfig
from orca_jax.values.request import SamplingParams

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "flags.md"
VLLM_PAGE = ROOT / "docs" / "vllm.md"
VLLM_NAMES = ROOT / "tests" / "flags" / "vllm_0.32.0.json"
HERE = "taken, as here"
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
        parts.append(f"\n### {title[:1].upper()}{title[1:]}\n\n| flag | meaning |\n|---|---|\n")
        parts += [_row(flag) for flag in flags if flag.option_strings]
    return "".join([*parts, habit_lists()])


def vllm_lists() -> str:
    """Return what happens to each flag and keyword of a version of vLLM."""
    names = json.loads(VLLM_NAMES.read_text(encoding="utf-8"))
    fields = {field.name for field in dataclasses.fields(EngineConfig)} | {"skip_tokenizer_init"}
    flags = [f"--{name}" for name in (*names["serve"], *names["removed"])]
    return "".join(
        [
            f"\n## Flags of `vllm serve` {names['version']}, and earlier ones\n\n",
            _table(flags, make_parser()._option_string_actions, refused_flags()),
            "\n## Values of these flags that are taken and named\n\n",
            _values(),
            "\n## Arguments of `LLM`\n\n",
            _table(names["LLM"], fields, refused_flags()),
            "\n## Arguments of `SamplingParams`\n\n",
            _table(
                names["SamplingParams"],
                SamplingParams.__dataclass_fields__,
                SamplingParams._refused,
            ),
        ]
    )


def _values() -> str:
    rows = []
    for name, row in own_values().items():
        flag = f"`method` of `--{name}`" if name == "speculative-config" else f"`--{name}`"
        rows.append(
            f"| {flag} | {', '.join(f'`{value}`' for value in row['values'])} | {row['reason']} |\n"
        )
    return "".join(["| flag | values | what it means here |\n|---|---|---|\n", *rows])


def habit_lists() -> str:
    """Return what happens to flags of llama.cpp, and what to run in the place of other programs' commands."""
    found = tables()
    rows = defaultdict(list)
    for flag, row in found["same"].items():
        rows["the same as " + " or ".join(f"`{name}`" for name in row["same"])].append(f"`{flag}`")
    for what, name in (("taken and named", "no_effect"), ("refused", "refused")):
        for reason, words in found[name].items():
            rows[f"{what}: {reason}"] += [f"`{word.rstrip('=*')}`" for word in words.split()]
    flags = "".join(f"| {what} | {', '.join(names)} |\n" for what, names in rows.items())
    commands = "".join(f"| `{name}` | {hint} |\n" for name, hint in found["commands"].items())
    return "".join(
        [
            f"\n## Flags of llama.cpp\n\n| what happens | flags |\n|---|---|\n{flags}",
            f"\n## Commands of other programs\n\n| command | here |\n|---|---|\n{commands}",
        ]
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


def _table(names: Iterable[str], own: Collection[str], refused: Any) -> str:
    rows = defaultdict(list)
    for name in names:
        shown = f"`{name}` (`{SAME[name]}`)" if name in SAME and name not in own else f"`{name}`"
        rows[verdict(name, own, refused)].append(shown)
    order = sorted(
        rows, key=lambda what: (what.startswith("refused"), what.startswith("taken and"), what)
    )
    lines = [f"| {what} | {', '.join(sorted(rows[what]))} |\n" for what in order]
    return "".join(["| what happens | names |\n|---|---|\n", *lines])


def renewed(text: str, content: str) -> str:
    """Return the text of a page with its list written again."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{content}\n{END}{rest.partition(END)[2]}"


def _row(flag: argparse.Action) -> str:
    names = ", ".join(f"`{name}`" for name in flag.option_strings)
    values = f": {', '.join(f'`{value}`' for value in flag.choices)}" if flag.choices else ""
    meaning = f"{(flag.help or '') % vars(flag)}{values}".replace("|", "\\|")
    return f"| {names} | {meaning} |\n"


if __name__ == "__main__":
    for page, content in ((PAGE, flag_list()), (VLLM_PAGE, vllm_lists())):
        page.write_text(renewed(page.read_text(encoding="utf-8"), content), encoding="utf-8")
