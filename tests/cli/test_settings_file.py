"""`--config FILE`: settings of every program with flags of an engine, below those of the command line."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from orca_jax.batch.args import make_parser as batch
from orca_jax.cli.chat import make_parser as chat
from orca_jax.cli.generate import make_parser as generate
from orca_jax.cli.main import main
from orca_jax.flags import FlagParser
from orca_jax.serve.args import make_parser as serve
from orca_jax.tools.bench.__main__ import COMMANDS
from orca_jax.tools.bench.__main__ import main as bench
from orca_jax.tools.bench.__main__ import make_parser as benchmarks
from orca_jax.tools.convert.args import make_parser as convert
from orca_jax.tools.plan.__main__ import make_parser as plan
from orca_jax.values.errors import ConfigError

PROGRAMS: dict[str, tuple[Callable[[], FlagParser], list[str]]] = {
    "serve": (serve, []),
    "generate": (generate, ["text"]),
    "chat": (chat, []),
    "batch": (batch, ["-i", "in", "-o", "out"]),
    "plan": (plan, ["--devices", "cpu"]),
    "convert": (convert, ["--output", "out"]),
    "bench": (lambda: benchmarks(["burst"]), ["burst"]),
}


def write(folder: Path, text: str) -> str:
    path = folder / "settings.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_command_line_overrides_the_file(name: str, tmp_path: Path) -> None:
    make_parser, needed = PROGRAMS[name]
    path = write(tmp_path, "model: preset:toy\nrevision: v1\n")
    read = make_parser().parse_args([*needed, "--config", path])
    assert (read.model, read.revision) == ("preset:toy", "v1")
    read = make_parser().parse_args([*needed, "--revision", "v2", f"--config={path}"])
    assert (read.model, read.revision) == ("preset:toy", "v2")
    assert make_parser().parse_args([*needed, "--model", "m"]).revision is None


def test_every_program_with_flags_of_an_engine_takes_a_file() -> None:
    (commands,) = (action for action in benchmarks()._actions if action.dest == "command")
    assert commands.choices and set(commands.choices) == set(COMMANDS)
    parsers = [make() for make, _ in PROGRAMS.values()] + list(commands.choices.values())  # type: ignore[union-attr]
    for parser in parsers:
        flags = parser._option_string_actions
        assert "--config" in flags or "--kv-cache-dtype" not in flags, parser.prog


def test_a_required_flag_may_be_in_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "input: rows.jsonl\noutput: answers.jsonl\nmax-num-seqs: 4k\n")
    read = batch().parse_args(["--config", path])
    assert (read.input, read.output, read.max_num_seqs) == (
        Path("rows.jsonl"),
        Path("answers.jsonl"),
        4000,
    )


def test_values_of_each_kind(tmp_path: Path) -> None:
    text = "json: true\nprogress: false\nstop: [a, -b]\ntemperature: 1\nblock_size: 32\nseed: null\nmodel: 7\n"
    read = generate().parse_args(["--config", write(tmp_path, text), "text"])
    assert (read.json, read.progress, read.stop) == (True, False, ["a", "-b"])
    assert (read.temperature, read.page_size, read.seed, read.model) == (1.0, 32, 0, "7")
    assert read.prompt == "text", "a list in the file takes no word of the command line"


def test_an_empty_file_sets_nothing(tmp_path: Path) -> None:
    assert chat().parse_args([f"--config={write(tmp_path, '')}"]).model == "demo"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max-num-seq: 3", "there is no setting 'max-num-seq'; did you mean max-num-seqs?"),
        ("config: x", "there is no setting 'config'"),
        ("no-progress: true", "there is no setting 'no-progress'"),
        ("engine: {}", "there is no setting 'engine'"),
        ("- port", "must hold flags and their values"),
        ("model: [", "is not valid YAML: line 1: "),
        ("a: !!python/object/apply:os.system [x]", "is not valid YAML: line 1: "),
        (
            "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]",
            "line 2: *a stands for a value of another line",
        ),
        ("a: &a {x: 1}\nb: {<<: *a}", "line 2: *a stands for a value of another line"),
        ("a: &a [*a]", "line 1: *a stands for"),
        (f"model: {'[' * 65}{']' * 65}", "line 1: it is nested deeper than 64 levels"),
        ("model: " + "[" * 50_000, "line 1: it is nested deeper than 64 levels"),
        (f"model: {'x' * 2**20}", "has more than 1048576 bytes"),
        ("seed: 1\nseed : 2\npage-size: 1\npage_size: 2", "sets page_size twice"),
        ("page-size: 1\nblock-size: 2", "sets block-size twice"),
        ("model: {a: 1}", "model: must be a plain value or a list of plain values, got {'a': 1}"),
        ("stop: []", "stop: must be a plain value or a list of plain values, got []"),
        ("model: [a, b]", "model: must be one value, got ['a', 'b']"),
        ("model: true", "model: must be a plain value"),
        ("progress: 3", "progress: must be true or false, got 3"),
        ("seed: many", "seed: 'many' is not an integer such as 4096"),
        ("temperature: warm", "temperature: invalid float value: 'warm'"),
        ("dtype: fp16", "dtype: invalid choice: 'fp16'"),
        ("dtype: fp16", "did you mean float16?"),
    ],
)
def test_a_wrong_file_is_one_line_with_file_and_key(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, text)
    assert main(["generate", "text", "--config", path]) == 2
    shown = capsys.readouterr().err
    assert (
        shown.startswith(f"error: --config: {path}") and message in shown and shown.count("\n") == 1
    )


@pytest.mark.parametrize(
    "run",
    [main, lambda words: bench(words[1:]) if words[0] == "bench" else main(words)],
    ids=["command", "module"],
)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_missing_file_is_named(
    name: str,
    run: Callable[[Sequence[str]], int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = str(tmp_path / "none.yaml")
    assert run([name, *PROGRAMS[name][1], "--config", path]) == 2
    shown = capsys.readouterr().err
    assert (
        f"{path} cannot be read: No such file or directory; give a YAML file" in shown
        and shown.count("\n") == 1
    )


def test_help_needs_no_file(capsys: pytest.CaptureFixture[str]) -> None:
    for word in ("--help", "--help=all"):
        with pytest.raises(SystemExit) as caught:
            main(["serve", "--config", "none.yaml", word])
        assert caught.value.code == 0
    assert "--config FILE" in capsys.readouterr().out


def test_settings_of_a_mapping_name_their_origin() -> None:
    parser = serve()
    parser.use_settings({"port": "81"}, "the arguments")
    assert parser.parse_args([]).port == 81 and "port" in parser.given([])
    with pytest.raises(ConfigError, match="the arguments: port: 'x' is not an integer"):
        parser.use_settings({"port": "x"}, "the arguments")
