"""The quick start: its blocks run, its flags and files exist, and its error messages are the real ones.

Shell and Python blocks run on a machine of stand-ins (tests/project/quickstart.py): nothing is downloaded, and servers
compile few shapes. Blocks for GPU and TPU machines run on the CPU, without their last lines; for these lines and for
installations, the tests check that the extras and flags exist.
"""

import ast
import json
import re
import shlex
import shutil
import socket
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path

import jax
import pytest

from orca_jax.assembly.engine import build_engine
from orca_jax.batch.args import parse_args as parse_batch
from orca_jax.helpers.bundled import chosen_model
from orca_jax.serve.args import parse_args
from orca_jax.serve.listen import listening
from orca_jax.values.config import EngineConfig
from orca_jax.values.errors import ConfigError
from tests.project.quickstart import BLOCKS, ERRORS, PAGE, Machine, small_model
from tests.project.source import ROOT

SERVES = ("./scripts/serve", ".venv/bin/orca-jax serve")
BATCHES = ".venv/bin/orca-jax batch"
HOW = ("serve", "run", "python", "install", "install", "serve", "run", "serve", "python", "run")


def lines(text: str) -> list[str]:
    return text.replace("\\\n", " ").splitlines()


def test_each_block_has_its_way_to_run() -> None:
    assert len(BLOCKS) == len(HOW)
    for (language, text), how in zip(BLOCKS, HOW, strict=True):
        assert (language == "python") == (how == "python")
        assert lines(text)[-1].startswith(SERVES) == (how in ("serve", "install"))


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_each_block_is_a_program_whose_names_and_flags_exist(block: tuple[str, str]) -> None:
    language, text = block
    if language == "python":
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and node.module:
                module = __import__(node.module, fromlist=["*"])
                assert all(hasattr(module, alias.name) for alias in node.names)
        return
    subprocess.run(["bash", "-n", "-c", text], check=True)
    for line in lines(text):
        if line.startswith(SERVES):
            parse_args(shlex.split(line.removeprefix(SERVES[0]).removeprefix(SERVES[1])))
        elif line.startswith(BATCHES):
            parse_batch(shlex.split(line.removeprefix(BATCHES)))
        else:
            assert all(
                (ROOT / path).is_file()
                for path in re.findall(r"scripts/\w+\.py|constraints\.txt", line)
            )


def test_extras_that_it_installs_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "optional-dependencies"
    ]
    named = set(re.findall(r"(?:\.|orca-jax)\[(\w+)\]", PAGE))
    assert named == {"cuda", "tpu"} and named <= set(extras)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("models") / "small")


def edited(model: Path, **changes: object) -> Path:
    file = model / "config.json"
    file.write_text(
        json.dumps({**json.loads(file.read_text(encoding="utf-8")), **changes}), encoding="utf-8"
    )
    return model


def without(model: Path, *names: str) -> Path:
    for name in names:
        (model / name).unlink()
    return model


def pickled(model: Path) -> Path:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    return model


def an_adapter(model: Path) -> Path:
    (model / "adapter_config.json").write_text("{}", encoding="utf-8")
    return model


def only_orbax(model: Path) -> Path:
    (model / "_METADATA").write_text("{}", encoding="utf-8")
    return without(model, "config.json")


# changes of a complete model, by the message they cause
WRONG: dict[str, Callable[[Path], EngineConfig]] = {
    "is not a directory": lambda model: EngineConfig("smol"),
    "config.json is missing": lambda model: EngineConfig(str(model.parent)),
    "model_type 'mamba' is not supported": lambda model: EngineConfig(
        str(edited(model, model_type="mamba"))
    ),
    "config.json: unknown for": lambda model: EngineConfig(str(edited(model, logit_scale=0.5))),
    "holds only pickled weights": lambda model: EngineConfig(str(pickled(model))),
    "it has neither model.safetensors nor": lambda model: EngineConfig(
        str(without(model, "model.safetensors"))
    ),
    "holds an adapter": lambda model: EngineConfig(str(an_adapter(model))),
    "has an Orbax checkpoint only": lambda model: EngineConfig(str(only_orbax(model))),
    "no tokenizer.json at": lambda model: EngineConfig(str(without(model, "tokenizer.json"))),
    "does not divide": lambda model: EngineConfig(str(model), tensor_parallel_size=5),
    "but this process sees 1": lambda model: EngineConfig(str(model), tensor_parallel_size=16),
    "GiB are free for the KV cache": lambda model: EngineConfig(
        str(model), scheduler="orca", max_num_seqs=65_536, tensor_parallel_size=1
    ),
    "is more than the model's": lambda model: EngineConfig(str(model), max_model_len=10**6),
}


@pytest.mark.parametrize("message", WRONG)
def test_errors_of_a_newcomer(message: str, model: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(model, tmp_path / "model"))
    jax.devices()  # JAX has started, so the number of devices is fixed
    with pytest.raises(ConfigError) as caught:
        build_engine(WRONG[message](copy))
    # tests have eight devices
    assert re.sub(r"sees 1\b", "sees 8", message) in caught.value.message


def test_the_error_of_a_used_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError) as caught, listening(parse_args(["--port", str(port)])):
            pass
    assert caught.value.message.replace(str(port), "8000").startswith(
        "port 8000 on 127.0.0.1 is already in use"
    )


def test_all_errors_of_the_page_are_tested() -> None:
    elsewhere = {"is not supported, only float64"}  # model/test_orbax_files.py
    assert len(ERRORS) > 5 and set(ERRORS) <= set(WRONG) | elsewhere


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_page_from_top_to_bottom(tmp_path: Path, port: int) -> None:
    machine = Machine(tmp_path, port)
    served, said = [], []
    try:
        for (_, text), how in zip(BLOCKS, HOW, strict=True):
            match how:
                case "serve":
                    served.append(machine.serve(text))
                case "python":
                    said.append(machine.run_python(text))
                case "install":
                    said.append(machine.run(text[: text.index(SERVES[1] + " --model")]))
                case _:
                    said.append(machine.run(text))
    finally:
        machine.stop()
    assert served == [chosen_model()[0], "smol", "smol"]
    assert json.loads(said[0])["usage"]["completion_tokens"] > 0, "the answer to curl"
    assert all(said[:-1]), "each block except the last has output"
    assert (machine.clone / "models" / "smol-orbax" / "params").is_dir()
    answers = (machine.clone / "answers.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(answers) == 2 and all(json.loads(answer)["error"] is None for answer in answers)
    installed = (machine.bin / "pip.txt").read_text(encoding="utf-8")
    assert (
        "-e .[cuda]" in installed and "-e .[tpu]" in installed and "--require-hashes" in installed
    )
