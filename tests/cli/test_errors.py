"""Each mistake on the command line is one line on standard error with a remedy, and has its documented exit status."""

import logging
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from orca_jax.cli.main import SUBCOMMANDS, main
from orca_jax.flags import flag_message
from orca_jax.tools.bench.__main__ import COMMANDS
from orca_jax.values.errors import ConfigError
from tests.cli.permissions import permissions_hold
from tests.project.source import ROOT

TOY = "--model preset:toy"
GONE = "http://127.0.0.1:9"  # the port of "discard", where nothing listens

# Words after `orca-jax`, with places of the fixture in braces; the exit status; a part of the message.
WRONG_FLAG = {
    "serve --max-num-seq 3": "--max-num-seq: did you mean --max-num-seqs?",
    "generate hello --temprature 1": "did you mean --temperature?",
    "chat --sytem x": "did you mean --system?",
    "batch -i a -o b --overwrit": "did you mean --overwrite?",
    "plan --model demo --devices cpu --contxt 3": "did you mean --context?",
    "convert --model demo --output x --quantisation int8": "did you mean --quantization?",
    "calibrate demo -i a -o b --fold 3": "did you mean --folds?",
    "completion csh": "did you mean tcsh?",
    "bench ofline": "did you mean offline?",
    "bench burst --num-request 3": "did you mean --num-requests?",
    "why --jsn": "did you mean --json?",
    "timeline x --perfeto y": "did you mean --perfetto?",
    "simulate chunkd": "did you mean chunked?",
    "simulate chunked --rates 1": "did you mean --rate?",
    "check-policy x.py:X --modle y": "did you mean --model?",
    "serve --dtype fp16": "did you mean float16?",
    "serve --port many": "argument --port: 'many' is not an integer such as 4096",
    "batch": "the following arguments are required: -i/--input, -o/--output; ",
    "completion": "the following arguments are required: shell; ",
    "plan --devices l4": "one of the arguments MODEL --model is required; ",
    "plan demo --model demo --devices l4": "--model: not allowed with argument MODEL; ",
    "serve --nothing-like-it": "unrecognized arguments: --nothing-like-it; ",
}
WRONG_PATH = {
    f"serve {TOY} --uds {{none}}/s": "No such file or directory; check the path",
    f"serve {TOY} --api-key-file {{none}}": "No such file or directory; check the path",
    f"serve {TOY} --ssl-keyfile {{none}} --ssl-certfile {{none}}": "No such file or directory; check the path",
    f"serve {TOY} --chat-template {{none}}": "is not a file; check the path",
    "serve --config {none}": "No such file or directory; give a YAML file",
    "generate hello --model {none}": "is not a directory; give a model directory",
    f"generate hello {TOY} --trace-file {{none}}/t": "No such file or directory; give a file in a writable directory",
    f"generate hello --base-url {GONE} --api-key-file {{none}}": "No such file or directory; check the path",
    "chat --model {none}": "is not a directory; give a model directory",
    f"batch -i {{none}} -o {{folder}}/out {TOY}": "No such file or directory; check the path",
    f"batch -i {{text}} -o {{none}}/out {TOY}": "is not a directory; create it first",
    "batch -i {text} -o {folder}/out --model {none}": "is not a directory; give a model directory",
    "plan --devices cpu --model {none}": "is not a directory; give a model directory",
    "convert --model {none} --output {folder}/out": "is not a directory; give a model directory",
    "convert --model demo --output {text}": "is not a directory; choose another path",
    "calibrate demo -i {none} -o {folder}/out": "No such file or directory; check the path",
    "calibrate demo -i {text} -o {none}/out": "No such file or directory",
    "bench schedulers --model {none}": "is not a directory; give a model directory",
    "bench replay {none}": "No such file or directory; check the path",
    f"bench burst {TOY} --plot {{none}}/x.svg": "No such file or directory; check the path",
    "why --api-key-file {none}": "No such file or directory; check the path",
    "timeline {none}": "No such file or directory; check the path",
    "simulate chunked --cost {none}": "No such file or directory; check the path",
    "check-policy {none}.py:X": "is not a file",
    "timeline {folder}": "Is a directory; give a file",
    "timeline {text}": "line 1 is not a line of a timeline",
}
NOT_PERMITTED = {
    "serve --config {secret}": "Permission denied; give a YAML file",
    f"serve {TOY} --uds {{locked}}/s": "Permission denied; change its permissions, or choose another path",
    f"serve {TOY} --api-key-file {{secret}}": "Permission denied; change its permissions, or choose another path",
    f"generate hello {TOY} --trace-file {{locked}}/t": "Permission denied; give a file in a writable directory",
    f"generate hello --base-url {GONE} --api-key-file {{secret}}": "Permission denied; change its permissions",
    f"batch -i {{secret}} -o {{folder}}/out {TOY}": "Permission denied; change its permissions",
    f"batch -i {{text}} -o {{locked}}/out {TOY}": "Permission denied; change its permissions",
    "convert --model demo --output {locked}/out": "Permission denied; choose another place, or change its permissions",
    "plan --devices cpu --model {hidden}": "Permission denied",
    "convert --model {hidden} --output {folder}/out": "Permission denied",
    "generate hello --model {hidden}": "Permission denied",
    "bench replay {secret}": "Permission denied; change its permissions",
    f"bench burst {TOY} --plot {{locked}}/x.svg": "Permission denied; change its permissions",
    "timeline {secret}": "Permission denied; change its permissions",
}
OTHERS = {
    f"serve {TOY} --port {{port}}": (2, "is already in use; use --port to choose another one"),
    f"generate hello --base-url {GONE}": (1, "does not answer: "),
    f"chat --base-url {GONE}": (1, "does not answer: "),
    f"batch -i {{text}} -o {{folder}}/out --max-retries 0 --base-url {GONE}": (
        1,
        "run the same command again to resume",
    ),
    f"bench online --base-url {GONE}": (2, "is not reachable: "),
    f"generate hello {TOY} --top-p 3": (2, "top_p"),
    f"generate hello --base-url {GONE} --page-size 8": (
        2,
        "--page-size: has no effect on the server at --base-url",
    ),
}
CASES = {
    **{
        words: (2, message)
        for table in (WRONG_FLAG, WRONG_PATH)
        for words, message in table.items()
    },
    **OTHERS,
}


@pytest.fixture
def places(tmp_path: Path) -> Iterator[dict[str, object]]:
    """Paths of each kind, and the port of another server."""
    for name in ("folder", "locked", "hidden"):
        (tmp_path / name).mkdir()
    (tmp_path / "text.txt").write_text("hello\n")
    (tmp_path / "secret").write_text("secret\n")
    (tmp_path / "hidden" / "config.json").write_text("{}")
    (tmp_path / "secret").chmod(0)
    (tmp_path / "locked").chmod(0o500)
    (tmp_path / "hidden").chmod(0)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        names = {name: tmp_path / name for name in ("folder", "locked", "hidden", "secret", "none")}
        yield {**names, "text": tmp_path / "text.txt", "port": taken.getsockname()[1]}
    for name in ("locked", "hidden"):
        (tmp_path / name).chmod(0o700)


def failure(
    words: str, places: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> tuple[int, str]:
    """Exit status and standard error of a command that fails."""
    try:
        status = main(words.format(**places).split())
    except SystemExit as ended:
        assert isinstance(ended.code, int)
        status = ended.code
    shown = capsys.readouterr()
    assert shown.out == "", "nothing was done"
    return status, shown.err


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Those of the log, kept: `serve` in this process installs one that writes to the captured stream."""
    root = logging.getLogger()
    before = root.handlers[:]
    yield
    root.handlers[:] = before


@pytest.mark.parametrize("words", CASES)
def test_one_line_with_a_remedy(
    words: str, places: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    expected, message = CASES[words]
    status, shown = failure(words, places, capsys)
    assert status == expected
    assert shown.startswith("error: ") and shown.endswith("\n") and shown.count("\n") == 1, shown
    assert message in shown


@pytest.mark.parametrize("words", NOT_PERMITTED)
def test_no_permission_is_one_line_too(
    words: str, places: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    with permissions_hold():
        status, shown = failure(words, places, capsys)
    assert status in (1, 2)
    assert shown.startswith("error: ") and shown.endswith("\n") and shown.count("\n") == 1, shown
    assert NOT_PERMITTED[words] in shown and str(places["folder"]).rpartition("/")[0] in shown


def test_permissions_are_refused_to_root_too(places: dict[str, object]) -> None:
    with permissions_hold(), pytest.raises(PermissionError):
        Path(str(places["secret"])).read_text()


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_each_subcommand_is_in_the_tables(name: str) -> None:
    assert any(words.split()[0] == name for words in WRONG_FLAG)
    if name != "completion":
        assert any(words.split()[0] == name for words in WRONG_PATH)


@pytest.mark.parametrize(
    ("message", "param", "shown"),
    [
        (
            "page_size must be at least 1, got 0",
            "page_size",
            "--page-size: page_size must be at least 1, got 0",
        ),
        (
            "config.json: n_head must be positive",
            "n_head",
            "--model: config.json: n_head must be positive",
        ),
        (
            "mapping.json: rows must be a list",
            "model",
            "--model: mapping.json: rows must be a list",
        ),
        ("there is no library", None, "there is no library"),
    ],
)
def test_an_error_names_a_flag_that_exists(message: str, param: str | None, shown: str) -> None:
    """A key of the model's files is not a flag."""
    assert flag_message(ConfigError(message, param)) == shown


@pytest.mark.parametrize("command", COMMANDS)
def test_wrong_flags_of_benchmarks(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, shown = failure(f"bench {command} --helpp", {}, capsys)
    assert (
        status == 2
        and shown.count("\n") == 1
        and re.search(r"did you mean|--help lists the flags", shown)
    )


def test_the_page_has_the_exit_statuses() -> None:
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    table = page.partition("## Exit status")[2].partition("\n## ")[0]
    assert {int(row) for row in re.findall(r"(?m)^\| (\d+) \|", table)} == {0, 1, 2, 3, 130}


@pytest.mark.slow
@pytest.mark.parametrize("program", [["orca_jax.cli", "serve"], ["orca_jax.serve"]])
def test_programs_of_their_own(program: list[str], places: dict[str, object]) -> None:
    """The words of a shell, up to a model that only the engine's process finds missing."""
    for words in ("--model {none}", "--config {none}", f"{TOY} --port {{port}}", "--prot 3"):
        command = [sys.executable, "-m", *program, *words.format(**places).split()]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
        assert done.stderr.startswith("error: ")
    command = [
        sys.executable,
        "-m",
        "orca_jax.cli",
        "--debug",
        "serve",
        "--config",
        str(places["none"]),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
