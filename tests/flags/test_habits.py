"""Habits of llama.cpp, ollama and vLLM: flags with a meaning here have it, and the others have a right hint."""

import pytest

from orca_jax.cli.chat import make_parser as chat_parser
from orca_jax.cli.generate import make_parser as generate_parser
from orca_jax.cli.main import SUBCOMMANDS, main
from orca_jax.cli.sampling import sampling_of
from orca_jax.flags.habits import in_own_words, is_habit, tables
from orca_jax.serve.args import make_parser, parse_args

OWN = set(make_parser()._option_string_actions)


def test_a_server_of_llama_cpp(capsys: pytest.CaptureFixture[str]) -> None:
    line = "-m model.gguf -c 4096 -ngl 99 --port 8080 --host 0.0.0.0 -np 4 -fa on --jinja -a name"
    config = parse_args(line.split())
    engine = config.engine
    assert (engine.model, engine.max_model_len, engine.max_num_seqs) == ("model.gguf", 4096, 4)
    assert (config.port, config.served_model_name) == (8080, ("name",))
    assert capsys.readouterr().err.endswith(": --jinja, -fa, -ngl\n")


def test_its_sampling_defaults() -> None:
    line = "-m model.gguf --temp 0.7 --top-k 40 --top-p 0.9 --min-p 0.05 -n 2 --n-predict=512"
    config = parse_args(line.split())
    expected = {"temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.05, "max_new_tokens": 512}
    assert config.generation_overrides == expected
    assert config.nnodes == 2, "-n of a server is vLLM's"


@pytest.mark.parametrize("words", ["-c 0", "--ctx-size=0", "-np -1", "--n-predict -1"])
def test_a_value_that_asks_for_nothing_is_named(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert parse_args(["preset:toy", *words.split()]) == parse_args(["preset:toy"])
    assert words.replace("=", " ").split()[0] in capsys.readouterr().err


def test_the_length_and_the_temperature_of_a_text() -> None:
    args = generate_parser().parse_args(
        ["Hello", "-n", "8", "--temp", "0.5", "-s", "3", "-ngl", "99", "-m", "demo"]
    )
    assert sampling_of(args) == {"max_tokens": 8, "temperature": 0.5, "seed": 3}
    assert (args.prompt, args.model) == ("Hello", "demo")
    assert chat_parser().parse_args(["-sys", "Be brief."]).system == "Be brief."


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (
            ["generate", "-p", "Hello"],
            "argument -p: llama.cpp's setting is not supported: give the text as a word",
        ),
        (["generate", "-cnv"], "run: orca-jax chat"),
        (["serve", "--lora", "a.gguf"], "--lora-modules NAME=PATH"),
        (["serve", "--n-cpu-moe", "10"], "use --quantization int8 or int4"),
        (["serve", "-ctk", "q8_0"], "--kv-cache-dtype"),
        (
            ["complete", "--quick", "x"],
            "there is no subcommand 'complete'; orca-jax generate TEXT --raw",
        ),
        (["run", "llama3.2"], "there is no subcommand 'run'; orca-jax chat MODEL"),
        (["pull", "llama3.2"], "download a model of the Hub"),
        (["list"], "HF_HOME"),
        (["llama-server", "-m", "x"], "orca-jax serve"),
        (["-m", "model.gguf", "-c", "4096"], "follow the subcommand: orca-jax serve -m"),
    ],
)
def test_other_habits_have_a_hint(
    words: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main(words)
    except SystemExit as error:
        status = int(error.code or 0)
    assert status == 2
    assert hint in capsys.readouterr().err


def test_the_tables_agree_with_the_programs() -> None:
    every = {flag for row in tables()["same"].values() for flag in row["same"]}
    known = (
        OWN
        | set(generate_parser()._option_string_actions)
        | set(chat_parser()._option_string_actions)
    )
    assert {flag.partition(".")[0] for flag in every} <= known, "each has its flag here"
    assert not tables()["commands"].keys() & SUBCOMMANDS.keys()
    groups = [set(tables()["same"])]
    for name in ("no_effect", "refused"):
        groups.append(
            {word.rstrip("=*") for words in tables()[name].values() for word in words.split()}
        )
    assert sum(map(len, groups)) == len(set().union(*groups)), "one verdict each"
    assert is_habit("-ngl") and not is_habit("--port")


def test_values_and_words_after_the_end_stay() -> None:
    kept, dropped = in_own_words(
        ["--port", "80", "-ngl", "-1", "-c=5", "x", "--", "-ngl", "9"], {"--max-model-len"}
    )
    assert (kept, dropped) == (
        ["--port", "80", "--max-model-len", "5", "x", "--", "-ngl", "9"],
        ["-ngl"],
    )
