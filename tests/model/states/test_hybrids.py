"""Models with states: log probabilities and greedy ids are those of transformers, in chunks and side by side."""

import gc
import json
import math
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from orca_jax.model.block import Pattern
from orca_jax.model.checkpoint import save_decoder
from orca_jax.model.describe import read_model_config
from orca_jax.model.load import load_decoder, prepare_load, random_decoder
from orca_jax.model.mixers import linear_attention
from orca_jax.model.parameters import flat_parameters, layers_of, path_of, split_layer
from orca_jax.model.stages import LayerSpan, spans
from orca_jax.model.transformer import Decoder
from orca_jax.values.errors import CheckpointError, ConfigError
from tests.covering import slow
from tests.model.recorded.test_recorded import changes_of
from tests.model.reference import mesh_of
from tests.model.states.hybrids import FIRST, NAMES, PROMPTS, RECORD, write
from tests.model.states.server import Server, run_one
from tests.project.source import ROOT
from tests.run.maps import MOST, num_maps

pytestmark = pytest.mark.usefixtures("quick_compiles")

# largest difference of log probabilities, and least one of a broken model
CLOSE, MUTATED = 2e-5, 1e-2
QUICK = ("lfm3-0", "minimax-2", "youtu-0", "qwen3_next-1", "qwen3_5_text-1", "bamba-1")
WITH_ALL_PARTS = ("youtu-0", "qwen3_next-1", "bamba-1")
SLOW_PARTS = (
    *(
        "falcon_h1-0",
        "qwen3_5_text-1",
        "qwen3_5_moe_text-1",
        "granitemoehybrid-0",
        "nemotron_h-0",
        "lfm2_moe-2",
        "zamba2-7",
    ),
    "deepseek_v3-0",
)
WITH_SNAPSHOTS = ("lfm3-0", "minimax-2")
# the layers of qwen3_5 are nearly those of qwen3_next, and most files of Falcon-H1 have no norm
DEFAULT = {*QUICK, "falcon_h1-1", "zamba2-7"} - {"qwen3_5_text-1"}
SLOW = {**dict.fromkeys(FIRST, (pytest.mark.slow,)), **dict.fromkeys(DEFAULT, ())}
MANY = (pytest.mark.slow, pytest.mark.record)  # the other numbers of each family
ALL = [pytest.param(name, marks=SLOW.get(name, MANY)) for name in NAMES]

# Tokens of each request in each launch, until all prompts and their answers are done.
LAUNCHES = (
    {0: 7, 1: 5},
    {0: 6, 1: 3, 2: 1},
    {1: 1, 2: 1, 0: 9},
    {1: 2, 2: 1},  # without request 0
    {0: 1, 1: 1, 2: 1},
    {2: 2, 1: 2, 0: 6},
    {1: 3, 2: 3, 0: 8},
)


@cache
def record(name: str) -> list[tuple[np.ndarray, np.ndarray]]:
    """The ids of each prompt and its answer, and the log probabilities after them."""
    with np.load(ROOT / RECORD) as stored:
        return [
            (stored[f"{name}/ids_{i}"], stored[f"{name}/logprobs_{i}"]) for i in range(len(PROMPTS))
        ]


@pytest.fixture(autouse=True)
def few_programs_at_once() -> Iterator[None]:
    """Drop JAX's programs between tests before they take too many maps: no engine of this module lives longer."""
    yield
    if num_maps() > MOST:
        jax.clear_caches()
        gc.collect()


@cache
def folder(name: str, base: Path) -> Path:
    path = base / name
    path.mkdir(exist_ok=True)
    write(name, path)
    return path


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hybrids")


def arranged(name: str, base: Path, form: str = "unrolled", devices: int = 1) -> Decoder:
    decoder = load_decoder(folder(name, base), dtype="float32", mesh=mesh_of(devices))
    if form != "stacked":
        decoder.unstack(switched=form == "switched")
    return decoder


@cache
def shared(name: str, base: Path) -> Server:
    """A server of a model, without requests: its program is compiled once."""
    return Server([arranged(name, base)], mesh_of(1))


def fresh(name: str, base: Path) -> Server:
    server = shared(name, base)
    server.reset([nnx.split(decoder)[1] for decoder in server.stages])
    return server


def served(
    name: str, server: Server, launches: Sequence[dict[int, int]] = LAUNCHES
) -> list[np.ndarray]:
    """The log probabilities of all requests, from their recorded ids."""
    found: list[list[np.ndarray]] = [[] for _ in PROMPTS]
    done = dict.fromkeys(range(len(PROMPTS)), 0)
    for sizes in launches:
        ids = {
            number: record(name)[number][0][done[number] :][:size].tolist()
            for number, size in sizes.items()
        }
        before = {
            number: server.requests[number].block for number in ids if number in server.requests
        }
        for number, out in server.launch(
            {number: own for number, own in ids.items() if own}
        ).items():
            found[number].append(out)
            done[number] += len(ids[number])
        for block in before.values():
            server.free(block)
    return [np.concatenate(parts) for parts in found]


def difference(name: str, found: Sequence[np.ndarray]) -> float:
    """The largest difference from the record."""
    pairs = zip(found, record(name), strict=True)
    return max(float(np.abs(ours - theirs[: len(ours)]).max()) for ours, (_, theirs) in pairs)


def check(name: str, server: Server) -> None:
    found = served(name, server)
    assert [len(ours) for ours in found] == [len(ids) for ids, _ in record(name)], (
        "all tokens are compared"
    )
    assert difference(name, found) <= CLOSE
    for ours, (ids, _), length in zip(found, record(name), PROMPTS, strict=True):
        assert ours[length - 1 : -1].argmax(axis=1).tolist() == ids[length:].tolist()


@pytest.mark.parametrize("name", ALL)
def test_log_probabilities_equal_transformers(name: str, base: Path) -> None:
    check(name, fresh(name, base))


@pytest.mark.slow
# with a pattern that repeats
@pytest.mark.parametrize(
    ("name", "form", "devices"),
    [
        ("lfm3-0", "stacked", 1),
        ("lfm3-0", "switched", 2),
        ("lfm3-2", "switched", 1),
        ("minimax-0", "stacked", 2),
        ("minimax-0", "switched", 1),
        ("youtu-0", "switched", 2),
    ],
)
def test_every_form_of_the_layers(name: str, form: str, devices: int, base: Path) -> None:
    decoder = arranged(name, base, form, devices)
    assert decoder.pattern.period in (1, 2, 3) and decoder.pattern.repeats
    check(name, Server([decoder], mesh_of(devices)))


@pytest.mark.parametrize(
    ("mixers", "period", "repeats"),
    [
        ("a", 1, True),
        ("aaa", 1, True),
        ("ab", 2, False),
        ("abab", 2, True),
        ("abcabc", 3, True),
        ("ababa", 5, False),
    ],
)
def test_periods(mixers: str, period: int, repeats: bool) -> None:
    names = {"a": "attention", "b": "short_conv", "c": "linear_attention"}
    pattern = Pattern(tuple((names[letter], "mlp") for letter in mixers))
    assert (pattern.period, pattern.repeats) == (period, repeats)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lfm3-0", "youtu-0"])  # with windows, and latents
def test_reference_attention(name: str, base: Path) -> None:
    check(name, Server([arranged(name, base)], mesh_of(1), "reference"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("lfm3-0", 4),
        ("minimax-2", 3),
        ("youtu-0", 2),
        ("nemotron_h-1", 2),
        ("zamba2-4", 3),
    ],
)
def test_stages(name: str, number: int, base: Path) -> None:
    """A stage may have no layer with some mixer. The decay depends on the layer in the model."""
    loading = prepare_load(folder(name, base), dtype="float32")
    parts = spans(loading.config, number)
    stages = [
        loading.load(mesh_of(1), span=span, arrange=lambda decoder: decoder.unstack())
        for span in parts
    ]
    assert number < 4 or {len(stage.pattern.parts) for stage in stages} == {1}
    check(name, Server(stages, mesh_of(1)))


@pytest.mark.parametrize("name", sorted(DEFAULT))
def test_a_layer_left_out_is_seen(name: str, base: Path) -> None:
    """Every mixer and every MLP: without its last matrix its layer changes nothing, or adds nothing."""
    server = fresh(name, base)
    (decoder,), (plain,) = server.stages, server.weights
    ends = ("out.kernel", "mlp.down.kernel", "mlp.down")
    paths = [path_of(keys) for keys, _ in nnx.to_flat_state(plain) if path_of(keys).endswith(ends)]
    parts = [part for kind in decoder.config.layers for part in kind.parts]
    assert len(paths) >= sum(part not in ("no_mixer", "no_mlp") for part in parts)
    for broken in paths:
        server.reset([without(plain, broken)])
        assert difference(name, served(name, server, LAUNCHES[:3])) > MUTATED, broken


@pytest.mark.parametrize("name", [*WITH_ALL_PARTS, *(slow(name) for name in SLOW_PARTS)])
def test_a_part_switched_off_is_seen(name: str, base: Path) -> None:
    """Each parameter of the first mixer and the first MLP of a kind, as zeros; a scale of a norm as ones."""
    server = fresh(name, base)
    (plain,) = server.weights
    paths = [path_of(keys) for keys, _ in nnx.to_flat_state(plain)]
    layers = reversed([*enumerate(server.stages[0].pattern.parts)])
    first = {part: f"blocks.{layer}.{part}." for layer, parts in layers for part in parts}
    for broken in (path for path in paths if path.startswith(tuple(first.values()))):
        server.reset([without(plain, broken, to=float(broken.endswith("scale")))])
        assert difference(name, served(name, server, LAUNCHES[:3])) > MUTATED, broken


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        *(
            ("granitemoehybrid-1", {f"{part}_scale": 1.0})
            for part in ("attention", "embedding", "logit", "residual")
        ),
        ("granitemoehybrid-0", {"layers": "no rope"}),
        ("granitemoehybrid-2", {"layers": "a rope"}),
        ("falcon_h1-0", {"mamba": {"norm": "gate_first"}}),
        ("falcon_h1-1", {"weight_factors": ()}),
        ("nemotron_h-0", {"activation": "relu"}),
        ("nemotron_h-0", {"layers": "a rope"}),
        ("nemotron_h-0", {"mamba": {"step_limits": (0.0, float("inf"))}}),
        ("nemotron_h-0", {"experts": {"router": {"used_groups": 4}}}),
        ("qwen3_5_text-1", {"norm_offset": 0.0}),
        ("qwen3_5_text-1", {"rope": {"rotated_dim": None}}),
        ("lfm2_moe-2", {"experts": {"router": {"scale": 1.0}}}),
        ("zamba2-7", {"attention_scale": None}),
        ("zamba2-4", {"layers": "no rope"}),
    ],
    ids=str,
)
def test_without_an_option_the_results_differ(
    name: str, changes: dict[str, Any], base: Path
) -> None:
    config = read_model_config(folder(name, base))
    changed = replace(config, **changes_of(config, changes))
    decoder = load_decoder(folder(name, base), dtype="float32", mesh=mesh_of(1), config=changed)
    decoder.unstack()
    assert difference(name, served(name, Server([decoder], mesh_of(1)), LAUNCHES[:3])) > MUTATED


def without(state: Any, path: str, to: float = 0.0) -> Any:
    """The parameters, of which one is zeros, or all of another value."""
    flat = [
        (
            keys,
            variable.replace(jnp.full_like(variable.get_value(), to))
            if path_of(keys) == path
            else variable,
        )
        for keys, variable in nnx.to_flat_state(state)
    ]
    return nnx.from_flat_state(flat)


@pytest.mark.parametrize("name", WITH_SNAPSHOTS)
def test_snapshots_and_states_that_are_not_restored(name: str, base: Path) -> None:
    """A source that was left alone gives the same results again. Another one, or a fresh state, gives others."""
    ids, expected = record(name)[0]
    server = fresh(name, base)
    server.launch({0: ids[:9].tolist()})
    snapshot = server.requests[0].block
    server.launch({0: ids[9:12].tolist()})
    newer = server.requests[0].block

    def again(block: int) -> float:
        server.requests[0].length = 9
        out = server.launch({0: ids[9:15].tolist()}, {0: block})[0]
        server.free(server.requests[0].block)
        return float(np.abs(out - expected[9:15]).max())

    assert again(snapshot) <= CLOSE
    assert again(newer) > MUTATED
    assert again(snapshot) <= CLOSE


@pytest.mark.slow
def test_a_wrong_decay_is_seen(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the layer below, as a stage that forgets its first layer would have."""
    decoder = arranged("minimax-2", base)
    for block in decoder.blocks:
        if block.linear_attention is not None:
            block.linear_attention.first_layer += 1
    table = np.pad(linear_attention.slope_table(4, decoder.num_layers), ((0, 1), (0, 0)))
    monkeypatch.setattr(linear_attention, "slope_table", lambda heads, layers: table)
    found = served("minimax-2", Server([decoder], mesh_of(1)), LAUNCHES[:3])
    assert difference("minimax-2", found) > MUTATED


def test_layers_without_states_refuse_models_with_them(base: Path) -> None:
    """The call of models with attention alone, as training and own decoders use it."""
    decoder, ids = arranged("lfm3-0", base), jnp.arange(4, dtype=jnp.int32)
    with pytest.raises(
        NotImplementedError, match=r"layers with short_conv keep states.*Decoder\.run_layers"
    ):
        jax.eval_shape(
            lambda ids: decoder(ids, ids, lambda layer, q, k, v, cache: (q, cache), 0)[0], ids
        )


@pytest.mark.slow
@pytest.mark.parametrize(("name", "form"), [("lfm3-0", "stacked"), ("minimax-0", "switched")])
def test_kept_tokens(name: str, form: str, base: Path) -> None:
    """Unless layers are scanned, the last one runs on the kept tokens alone."""
    decoder, ids = arranged(name, base, form), jnp.arange(6, dtype=jnp.int32)
    run = jax.jit(partial(run_one, decoder))
    whole, kept = run(ids, None), run(ids, jnp.array([5, 2], jnp.int32))
    np.testing.assert_allclose(np.asarray(kept), np.asarray(whole)[[5, 2]], atol=1e-5)


def nemotron(folder: Path, kinds: list[str], base: Path) -> Decoder:
    """A Nemotron-H with layers of these kinds; MLPs add zeros."""
    folder.mkdir()
    write("nemotron_h-1", base)
    config = json.loads((base / "config.json").read_text())
    del config["num_hidden_layers"]
    (folder / "config.json").write_text(
        json.dumps({**config, "layers_block_type": kinds, "mlp_bias": True})
    )
    stored, found = load_file(base / "model.safetensors"), {}
    for number, kind in enumerate(kinds):
        source = config["layers_block_type"].index(kind)
        layer = {key: values for key, values in stored.items() if f".layers.{source}." in key}
        found |= {
            key.replace(f".{source}.", f".{number}."): values for key, values in layer.items()
        }
    found = {key: 0 * values if "down_proj" in key else values for key, values in found.items()}
    found |= {key: values for key, values in stored.items() if ".layers." not in key}
    save_file(found, folder / "model.safetensors")
    return load_decoder(folder, dtype="float32", mesh=mesh_of(1))


def test_a_model_of_single_parts_may_have_no_mlp(tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    kinds = ["linear_attention", "full_attention", "linear_attention"]
    without = nemotron(tmp_path / "without", kinds, base)
    with_zeros = nemotron(tmp_path / "with", [kinds[0], "mlp", *kinds[1:]], base)
    assert not [path for path in flat_parameters(nnx.state(without)) if ".mlp." in path]
    ids = jnp.arange(6, dtype=jnp.int32)
    found = [jax.jit(partial(run_one, decoder))(ids, None) for decoder in (without, with_zeros)]
    np.testing.assert_allclose(*found, atol=1e-6)


def test_an_infinite_limit_is_read_as_transformers_writes_it(base: Path) -> None:
    directory = folder("bamba-1", base)
    config = json.loads((directory / "config.json").read_text())
    expected = read_model_config(directory)
    (other := base / "infinite").mkdir()
    config["time_step_limit"] = [0.0, {"__float__": "Infinity"}]
    config["_pad_token_id"] = 3
    (other / "config.json").write_text(json.dumps(config))
    found = read_model_config(other)
    assert found.mamba is not None and found.mamba.step_limits == (0.0, math.inf)
    assert expected.mamba is not None and expected.mamba.step_limits == (0.0, math.inf)
    config["time_step_limit"] = [0.0, {"__float__": "NaN"}]
    (other / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="time_step_limit must be a list of two numbers"):
        read_model_config(other)


def test_the_layers_of_a_parameter(base: Path) -> None:
    config = read_model_config(folder("minimax-2", base))
    assert layers_of("blocks.attention.query.kernel", config) == (0,)
    assert layers_of("blocks.linear_attention.norm.scale", config) == (1, 2)
    assert (
        layers_of("blocks.mlp.router", config)
        == layers_of("blocks.attention_norm.scale", config)
        == (0, 1, 2)
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lfm3-0", *WITH_ALL_PARTS])
def test_orbax_and_stages_hold_the_same_parameters(name: str, base: Path, tmp_path: Path) -> None:
    """A parameter of some layers is stacked over these alone; a stage begins at any of them."""
    original = arranged(name, base, "stacked")
    shutil.copy(folder(name, base) / "config.json", tmp_path)
    save_decoder(original, tmp_path, "float32")
    expected = layers_of_all(flat_parameters(nnx.state(arranged(name, base))))
    for source in (tmp_path, folder(name, base)):
        loading = prepare_load(source, dtype="float32")
        for span in spans(loading.config, 2):
            for form in (lambda decoder: None, lambda decoder: decoder.unstack()):
                stage = loading.load(mesh_of(1), span=span, arrange=form)
                if not isinstance(stage.blocks, nnx.List):
                    stage.unstack()
                found = layers_of_all(flat_parameters(nnx.state(stage)), span.start)
                assert {layer for layer, _ in found} == {*range(span.start, span.stop)}
                for key, value in found.items():
                    np.testing.assert_array_equal(
                        np.asarray(value), np.asarray(expected[key]), err_msg=str(key)
                    )


def layers_of_all(parameters: dict[str, Any], first: int = 0) -> dict[tuple[int, str], Any]:
    """The parameters of separate layers, by the layer in the model and their path."""
    found = {split_layer(path): value for path, value in parameters.items()}
    return {
        (layer + first, path): value for (path, layer), value in found.items() if layer is not None
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", ["youtu-0", "bamba-1"])
def test_random_values_depend_neither_on_stages_nor_on_devices(name: str, base: Path) -> None:
    config = read_model_config(folder(name, base))

    def drawn(devices: int, span: LayerSpan | None = None) -> dict[tuple[int, str], Any]:
        decoder = random_decoder(config, dtype="float32", mesh=mesh_of(devices), span=span)
        decoder.unstack()
        return layers_of_all(flat_parameters(nnx.state(decoder)), 0 if span is None else span.start)

    whole = drawn(2)
    stages = [drawn(1, span) for span in spans(config, 2)]
    assert set(whole) == {key for stage in stages for key in stage}
    for stage in stages:
        for key, value in stage.items():
            np.testing.assert_array_equal(
                np.asarray(value), np.asarray(whole[key]), err_msg=str(key)
            )


@pytest.mark.parametrize("name", WITH_SNAPSHOTS)
def test_missing_tensors_are_named_for_the_layers_that_need_them(
    name: str, base: Path, tmp_path: Path
) -> None:
    write(name, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    lost = next(key for key in tensors if key.endswith(("conv.conv.weight", "qkv_proj.weight")))
    tensors["model.layers.99.conv.conv.weight"] = tensors.pop(lost)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        load_decoder(tmp_path, dtype="float32", mesh=mesh_of(1))
    assert set(caught.value.problems) == {
        f"{lost}: missing",
        "model.layers.99.conv.conv.weight: unexpected",
    }
