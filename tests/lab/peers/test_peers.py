"""Comparisons with other engines: fakes on both sides, the protocol of the programs, and the files they read."""

import ast
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from lab.__main__ import main
from lab.peers import command, environment, offline, served
from lab.peers.environment import intel_openmp, prepare_environment, program_of
from lab.peers.inputs import checkpoint_shapes, model_for_peers, read_workload, write_workload
from lab.peers.offline import Pairs, alternate
from lab.peers.own import run_passes
from lab.peers.page import SHAPES, page
from lab.peers.registry import CLIENTS, PEERS, TORCH, Peer
from lab.peers.side import PREFIX, Side
from orca_jax.assembly.engine import build_engine
from orca_jax.model.describe import read_model_config
from orca_jax.tools.bench.workload.generate import WorkloadRequest
from orca_jax.values.config import EngineConfig
from orca_jax.values.errors import ConfigError, OrcaError
from tests.project.source import ROOT

PROGRAMS = ROOT / "lab" / "peers" / "programs"
READY = {"versions": {"fake": "1.0"}, "hardware": {"devices": "none"}}

# It follows the protocol, with passes of 1, 2, ... times a rate; RATE is replaced.
FAKE = f"""
import json, sys
print("a log before")
print("{PREFIX}" + json.dumps({{"ready": {{**{READY!r}, "flags": sys.argv[1:]}}}}), flush=True)
for number, _ in enumerate(sys.stdin, start=1):
    print("{PREFIX}" + json.dumps({{"pass": {{"output_tokens_per_s": RATE * number}}}}), flush=True)
"""

# A program of its own on the common code; FAULT is subtracted from the tokens of each request.
ON_COMMON = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from lab.peers.programs.common import arguments, parse, run
args = parse(arguments("a fake", ("only",)))
run(args, lambda requests: [one.num_output - (FAULT if one.num_output != 4 else 0) for one in requests], (), {{}})
"""


def fake(folder: Path, name: str, rate: float) -> Path:
    path = folder / name
    path.write_text(FAKE.replace("RATE", str(rate)), encoding="utf-8")
    return path


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    workload = [WorkloadRequest(0.0, (1, 2, 3), 2), WorkloadRequest(0.0, (4,), 3)]
    write_workload(tmp_path / "workload.json", workload, {"trace": "orca"})
    return tmp_path / "workload.json"


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Fake programs on both sides, and the flags to compare them."""
    python = tmp_path / "environment" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    peer = Peer(
        str(fake(tmp_path, "peer.py", 10.0)),
        ("slow", "fast"),
        (),
        (),
        server=str(fake_server(tmp_path)),
    )
    broken = Peer(str(tmp_path / "broken.py"), ("only",), (), ())
    (tmp_path / "broken.py").write_text(
        f"raise SystemExit('error: no engine in {tmp_path}/environment/bin')"
    )
    monkeypatch.setattr(command, "PEERS", {"fake": peer, "broken": broken})
    ours = fake(tmp_path, "ours.py", 15.0)
    monkeypatch.setattr(offline, "own_command", lambda *_: [sys.executable, str(ours)])
    folder = tmp_path / "environment"
    flags = ["--environment", f"fake={folder}", f"broken={folder}", "--model", "preset:gpt2-tiny"]
    return ["peers", *flags, "--num-requests", "2", "--threads", "1", "--dtype", "bfloat16"]


def fake_server(folder: Path) -> Path:
    path = folder / "server.py"
    path.write_text(f"""
import json, sys
print("{PREFIX}" + json.dumps({{"ready": {{"url": "http://fake", "flags": ["-t", "1"]}}}}), flush=True)
sys.stdin.read()
""")
    return path


def test_the_whole_comparison_with_fakes(
    fakes: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "peers.json"
    assert main([*fakes, "--offline", "--save", str(saved)]) == 0
    printed = capsys.readouterr().out
    result = json.loads(printed.splitlines()[-1])
    # Ours stays loaded for all modes, so its passes go on from the fourth; the peer starts anew.
    assert result["ratios"] == {"fake/bfloat16/slow/1": 1.5, "fake/bfloat16/fast/1": 75 / 20}
    assert result["settings"]["fake/bfloat16/slow/1"]["own_passes"] == [15, 30, 45]
    assert result["settings"]["fake/bfloat16/fast/1"]["ratio_least"] == 90 / 30
    seen = result["sides"]["fake/fast"]["flags"]
    assert seen[seen.index("--mode") + 1] == "fast" and "--on-request" in seen
    assert "cpu_flags" in result["hardware"] and "ratio 1.50 (1.50 to 1.50)" in printed
    # The other peers go on without the broken one, and no folder of this machine is reported.
    assert result["unavailable"]["broken"].endswith("error: no engine in bin")
    assert str(tmp_path) not in saved.read_text() + page(result) + printed.splitlines()[-1]
    assert json.loads(saved.read_text()) == result
    assert "| fake | bfloat16 | fast | 1 | 75.0 | 20.0 | **3.75** |" in page(result)
    assert "| preset:gpt2-tiny | 64 | fake, fast | bfloat16 | 75.0 | 20.0 | **3.75** |" in page(
        result, [result]
    )


def test_later_runs_add_to_the_results(
    fakes: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "peers.json"
    for mode in ("slow", "fast"):
        flags = [
            "--peer",
            "fake",
            "--modes",
            mode,
            "--offline",
            "--rounds",
            "1",
            "--save",
            str(saved),
        ]
        assert main([*fakes, *flags]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["ratios"] == {"fake/bfloat16/slow/1": 1.5, "fake/bfloat16/fast/1": 1.5}
    assert "**1.50**" in page(result)
    for text in ("[1]", "{}"):
        saved.write_text(text)
        assert main([*fakes, "--offline", "--save", str(saved)]) == 2
        assert "has no results of this command" in capsys.readouterr().err


def test_servers_take_the_same_rates(
    fakes: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    calls: list[list[str]] = []

    def client(given: list[str]) -> dict[str, Any]:
        """Answer as `bench online` does: the burst of ours is at 2 requests/s, and latencies grow with each call."""
        calls.append(given)
        at = given.index("--request-rate") + 1
        rates = given[at : given.index("--goodput")]
        passes = [
            {name: 10.0 * len(calls) for name in served.FIGURES} | {"request_throughput": 2.0}
            for _ in rates
        ]
        return {
            "passes": [
                one | {"request_rate": rate} for one, rate in zip(passes, rates, strict=True)
            ]
        }

    monkeypatch.setattr(served, "_last_line", client)
    ours = [sys.executable, str(fake_server(tmp_path))]
    monkeypatch.setattr(served, "own_command", lambda *_: ours)
    monkeypatch.setattr(served.statistics, "median", max)
    assert (
        main(
            [*fakes, "--peer", "fake", "--online", "--online-rounds", "2", "--load", "0.5", "1.25"]
        )
        == 0
    )
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    rates = [call[call.index("--request-rate") + 1 : call.index("--goodput")] for call in calls]
    assert rates == [["inf"], ["1.0", "2.5"]] * 4
    assert list(result["online"]["orca-jax/bfloat16/chunked/1"]) == [
        "burst",
        "0.5",
        "1.25",
        "date",
        "commit",
        "num_requests",
    ]
    # Ours is measured first and last, the peer second and third: calls 1, 2, 7, 8 and 3 to 6.
    assert result["ratios"] == {"fake/bfloat16//1/online": 70 / 50}
    assert result["latency_ratios"]["fake/bfloat16//1/1.25"] == 80 / 60
    assert result["servers"]["fake/bfloat16//1"] == {"flags": ["-t", "1"]}


def test_ratios_by_hand() -> None:
    figures = Pairs([10.0, 30.0, 20.0], [10.0, 10.0, 5.0]).figures()
    assert (figures["ratio"], figures["ratio_least"], figures["ratio_most"]) == (3, 1, 4)
    assert (figures["own_tokens_per_s"], figures["peer_tokens_per_s"]) == (20, 10)


def test_sides_take_turns_in_being_first() -> None:
    order: list[str] = []

    class Recorded:
        def __init__(self, name: str) -> None:
            self.name = name

        def run_pass(self) -> dict[str, float]:
            order.append(self.name)
            return {"output_tokens_per_s": float(len(order))}

    own, peer = Recorded("own"), Recorded("peer")
    pairs = alternate(own, peer, 3)  # type: ignore[arg-type]
    assert order == ["own", "peer", "peer", "own", "own", "peer"]
    assert (pairs.own, pairs.peer) == ([1, 4, 5], [2, 3, 6])


def side_on_common(inputs: Path, fault: int) -> Side:
    program = ON_COMMON.replace("FAULT", str(fault))
    flags = ["--workload", str(inputs), "--model", "none", "--threads", "1", "--on-request"]
    return Side("fake", [sys.executable, "-c", program, *flags], timeout=60)


def test_programs_speak_the_protocol(inputs: Path) -> None:
    with side_on_common(inputs, 0) as side:
        config = side.about()["config"]
        assert (config["mode"], config["threads"]) == ("only", 1)
        assert [side.run_pass()["output_tokens_per_s"] > 0 for _ in range(2)] == [True, True]


def test_a_pass_with_other_lengths_is_refused(inputs: Path) -> None:
    with side_on_common(inputs, 1) as side:
        side.about()
        with pytest.raises(
            OrcaError, match=r"fake ended with code 1; .* requested \[2, 3\] tokens, got \[1, 2\]"
        ):
            side.run_pass()


def test_a_program_that_ends_or_hangs() -> None:
    fails = "import sys; print('no such model', file=sys.stderr); sys.exit(3)"
    with (
        Side("fake", [sys.executable, "-c", fails], timeout=60) as side,
        pytest.raises(
            OrcaError, match=r"fake ended with code 3; its output ends with: no such model"
        ),
    ):
        side.about()
    with (
        Side("fake", [sys.executable, "-c", "import time; time.sleep(60)"], timeout=0.1) as side,
        pytest.raises(OrcaError, match=r"fake took more than 0\.1 seconds; raise --timeout"),
    ):
        side.about()


def test_our_side_speaks_the_protocol(inputs: Path) -> None:
    out = io.StringIO()
    with build_engine(EngineConfig(model="preset:toy", enable_prefix_caching=False)) as built:
        run_passes(built, read_workload(inputs), {"config": {}}, ["pass\n", "pass\n"], out)
    messages = [json.loads(line.removeprefix(PREFIX)) for line in out.getvalue().splitlines()]
    assert [list(message) for message in messages] == [["ready"], ["pass"], ["pass"]]
    assert messages[1]["pass"]["output_tokens_per_s"] > 0


def test_a_workload_survives_its_file(tmp_path: Path) -> None:
    workload = [WorkloadRequest(0.5, (1, 2), 3)]
    write_workload(tmp_path / "w", workload, {})
    assert read_workload(tmp_path / "w") == workload


@pytest.mark.parametrize(
    ("preset", "parameters"),
    [("gpt2", 124_439_808), ("llama-3-8b", 8_030_261_248), ("mixtral-8x7b", 46_702_792_704)],
)
def test_checkpoints_have_the_known_number_of_parameters(preset: str, parameters: int) -> None:
    total = 0
    for shape in checkpoint_shapes(read_model_config(f"preset:{preset}")).values():
        size = 1
        for length in shape:
            size *= length
        total += size
    assert total == parameters


def test_the_model_of_a_preset_can_be_loaded(tmp_path: Path) -> None:
    import jax
    import numpy as np

    from orca_jax.model.load import load_decoder, tensor_mesh

    folder = model_for_peers("preset:gpt2-tiny", 3, tmp_path / "model")
    decoder = load_decoder(folder, dtype="float32", mesh=tensor_mesh(jax.devices()[:1]))
    assert read_model_config(folder) == read_model_config("preset:gpt2-tiny")
    assert np.all(np.asarray(decoder.final_norm.scale[...]) == 1)
    assert 0.019 < np.asarray(decoder.embedding.table[...])[:512].std() < 0.021


@pytest.mark.parametrize("name", [*SHAPES, "qwen3"])
def test_shapes_have_weights_of_their_families(name: str, tmp_path: Path) -> None:
    """A small model of the same kinds of layers is drawn and loaded, and the files hold nothing else."""
    import jax

    from orca_jax.model.load import load_decoder, tensor_mesh

    config = json.loads(
        (ROOT / "lab" / "peers" / "shapes" / name / "config.json").read_text(encoding="utf-8")
    )
    small = {
        "vocab_size": 48,
        "hidden_size": 32,
        "intermediate_size": 16,
        "num_hidden_layers": 3,
        "head_dim": 8,
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
    sizes = {key: value for key, value in {**small, **heads}.items() if key in config}
    if "layer_types" in config:
        sizes["layer_types"] = config["layer_types"][:3]
    (tmp_path / "config.json").write_text(json.dumps({**config, **sizes}), encoding="utf-8")
    folder = model_for_peers(str(tmp_path), 3, tmp_path / "model")
    load_decoder(folder, dtype="float32", mesh=tensor_mesh(jax.devices()[:1]))
    assert model_for_peers(str(folder), 3, tmp_path / "other") == folder


def test_write_leaves_the_inputs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", "preset:gpt2-tiny", "--num-requests", "3"]
    assert main(["peers", "--write", str(tmp_path / "in"), *flags]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(read_workload(Path(found["workload"]))) == 3
    assert (Path(found["model"]) / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--environment", "x"], "environment 'x' is not NAME=DIR with one of these names: vllm, "),
        (["--rounds", "0"], "rounds must be at least 1"),
        (
            ["--peer", "vllm", "--modes", "sluggish"],
            "modes of vllm are eager, compiled, got 'sluggish'",
        ),
        (["--threads", "100000"], "threads must be from 1 to"),
        (["--online", "--offline"], "offline and online exclude each other"),
        (["--load", "0"], "load must be above 0"),
        (["--goodput", "speed:1"], "goodput has no limit 'speed'"),
    ],
)
def test_wrong_flags_are_errors(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["peers", *flags]) == 2
    assert message in capsys.readouterr().err


def test_an_environment_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def record(given: list[str]) -> None:
        calls.append(given)
        if "venv" in given:
            (tmp_path / "new" / "bin").mkdir(parents=True)
            (tmp_path / "new" / "bin" / "python").touch()

    monkeypatch.setattr(environment, "_run", record)
    monkeypatch.setattr(environment, "_runs", lambda _: True)
    monkeypatch.setattr(environment.shutil, "which", lambda name: f"found/{name}")
    python = prepare_environment(PEERS["vllm"], tmp_path / "new")
    assert python == prepare_environment(PEERS["vllm"], tmp_path / "new")
    assert calls[0] == ["found/python3.11", "-m", "venv", str(tmp_path / "new")]
    assert calls[1][-2:] == [TORCH, *PEERS["vllm"].packages]
    assert calls[2][-3:] == list(PEERS["vllm"].unwanted)
    assert len(calls) == 3
    (tmp_path / "new" / ".orca-jax-incomplete").touch()  # as if a run had been killed
    prepare_environment(PEERS["vllm"], tmp_path / "new")
    assert len(calls) == 6 and not (tmp_path / "new" / ".orca-jax-incomplete").exists()


def test_a_peer_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []

    def record(given: list[str]) -> None:
        calls.append(given)
        (tmp_path / "built").touch()

    monkeypatch.setattr(environment, "_run", record)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    peer = Peer("", (), (), (), build="build_llama_cpp.py", built="built")
    assert prepare_environment(peer, tmp_path) == prepare_environment(peer, tmp_path)
    assert calls == [[str(tmp_path / "bin" / "python"), str(PROGRAMS / "build_llama_cpp.py")]]


def test_environments_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is not an environment of Python"):
        prepare_environment(PEERS["vllm"], tmp_path)
    monkeypatch.setattr(environment.shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match=r"python3\.11 is not on the PATH"):
        prepare_environment(PEERS["vllm"], tmp_path / "new")
    # A Python without network: making the folder works, and pip fails.
    stand_in = tmp_path / "stand-in"
    stand_in.write_text('#!/bin/sh\n[ "$1" = -c ] && exit\n'
                        '[ "$2" = venv ] && mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && exit\n'
                        'echo "no route to host" >&2; exit 1\n')  # fmt: skip
    stand_in.chmod(0o755)
    monkeypatch.setattr(environment.shutil, "which", lambda name: str(stand_in))
    with pytest.raises(
        OrcaError, match="ended with code 1: no route to host; it needs the network"
    ):
        prepare_environment(PEERS["vllm"], tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_programs_need_a_source_tree(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the programs of peers are in the source tree"):
        program_of("vllm_offline.py", tmp_path)
    named = [
        name
        for peer in (PEERS | CLIENTS).values()
        for name in (peer.program, peer.server, peer.build)
        if name
    ]
    assert len(named) >= 5 and all(program_of(name).is_file() for name in named)


def test_intel_openmp_is_found_in_wheels(tmp_path: Path) -> None:
    assert intel_openmp(tmp_path) is None
    library = tmp_path / "lib" / "python3.11" / "site-packages" / "torch" / "lib" / "libiomp5.so"
    library.parent.mkdir(parents=True)
    library.touch()
    assert intel_openmp(tmp_path) == library


@pytest.mark.parametrize("path", sorted(PROGRAMS.glob("*.py")), ids=lambda path: path.name)
def test_programs_run_on_older_pythons_without_this_package(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 11))
    modules = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    modules += [
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    ]
    assert modules and not [name for name in modules if name.startswith("orca_jax")]
