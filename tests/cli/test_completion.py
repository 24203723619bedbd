"""`orca-jax completion SHELL`: scripts with the subcommands, their flags, values and files."""

import shutil
import subprocess
from pathlib import Path

import pytest
import shtab

from orca_jax.cli.completion import SHELLS, whole_parser
from orca_jax.cli.main import SUBCOMMANDS, main

CHECKS = {
    "bash": ["bash", "-n"],
    "zsh": ["zsh", "-n"],
    "fish": ["fish", "--no-execute"],
    "tcsh": ["tcsh", "-n"],
}
QUESTION = """
source {script}
COMP_LINE='orca-jax {words}' COMP_WORDS=(orca-jax {words}) COMP_CWORD={last}
COMP_WORDS[{last}]='{word}'
$(complete -p orca-jax | sed 's/.*-F \\([^ ]*\\).*/\\1/')
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.fixture(scope="module")
def parser() -> object:
    """The parsers of all subcommands, which take a second to make."""
    return whole_parser()


@pytest.fixture(scope="module")
def scripts(parser: object, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("completion")
    for shell in SHELLS:
        (folder / shell).write_text(shtab.complete(parser, shell))
    return {shell: folder / shell for shell in SHELLS}


def suggestions(script: Path, *words: str) -> set[str]:
    """The words that bash suggests for the last word."""
    question = QUESTION.format(
        script=script, words=" ".join(words), last=len(words), word=words[-1]
    )
    asked = subprocess.run(
        ["bash", "-c", question], capture_output=True, text=True, check=True, cwd=script.parent
    )
    return set(asked.stdout.split())


def test_shells_are_those_of_the_library() -> None:
    assert set(SHELLS) == set(shtab.SUPPORTED_SHELLS)


@pytest.mark.parametrize("shell", SHELLS)
def test_subcommands_and_flags_are_in_every_script(shell: str, scripts: dict[str, Path]) -> None:
    script = scripts[shell].read_text()
    assert all(name in script for name in SUBCOMMANDS)
    assert "max-num-batched-tokens" in script and "quantization" in script


@pytest.mark.parametrize("shell", CHECKS)
def test_the_script_is_valid(shell: str, scripts: dict[str, Path]) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    checked = subprocess.run(
        [*CHECKS[shell], str(scripts[shell])], capture_output=True, text=True, check=False
    )
    assert (checked.returncode, checked.stderr) == (0, "")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["serve", "--max-mo"], {"--max-model-len"}),
        (["serve", "--dtype", "bf"], {"bfloat16"}),
        (["convert", "--quan"], {"--quantization"}),
        (["convert", "--quantization", "int"], {"int8", "int4"}),
        (["generate", "--conf"], {"--config"}),
        (["bench", "offl"], {"offline"}),
        (["bench", "offline", "--num-r"], {"--num-requests"}),
        (["timeline", "--perf"], {"--perfetto"}),
        (["con"], {"convert"}),
    ],
)
def test_bash_suggests(words: list[str], expected: set[str], scripts: dict[str, Path]) -> None:
    assert suggestions(scripts["bash"], *words) == expected


def test_bash_suggests_files(scripts: dict[str, Path]) -> None:
    assert "fish" in suggestions(scripts["bash"], "serve", "--config", "fi")


def test_every_parser_is_in_the_completion(parser: object) -> None:
    (subparsers,) = (
        action for action in parser._actions if action.choices and "serve" in action.choices
    )  # type: ignore[attr-defined]
    assert list(subparsers.choices or ()) == list(SUBCOMMANDS)


def test_the_command_prints_the_script(
    scripts: dict[str, Path],
    parser: object,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("orca_jax.cli.completion.whole_parser", lambda: parser)
    assert main(["completion", "bash"]) == 0
    assert capsys.readouterr().out == scripts["bash"].read_text() + "\n"
