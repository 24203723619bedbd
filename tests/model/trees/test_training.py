"""The tree of a training script of one's own serves by mapping.json, step directory and optimiser state included."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from safetensors.numpy import load_file

from orca_jax.helpers.orbax_names import MAPPING, PARAMS
from orca_jax.model.load import load_decoder
from orca_jax.model.trees.mapping import read_mapping
from orca_jax.model.trees.rows import OPERATIONS as OF_ROWS
from orca_jax.values.errors import ConfigError
from tests.model.orbax import refusal
from tests.model.reference import REFERENCE, logits, mesh_of
from tests.model.trees.layouts import assert_equals_reference, model_directory, put

pytestmark = pytest.mark.usefixtures("quick_compiles")

NAME = "gpt2-12-heads"
EMBED, HEADS, DIM, LAYERS, VOCAB, CONTEXT = 16, 2, 8, 2, 50, 48
CONFIG = {
    "model_type": "gpt2",
    "n_embd": EMBED,
    "n_head": HEADS,
    "n_layer": LAYERS,
    "vocab_size": VOCAB,
}
CONFIG |= {"n_positions": CONTEXT, "eos_token_id": None}
Mapping = dict[str, Any]


class Attention(nnx.Module):
    """Causal attention with one kernel [E, 3, H, D] for queries, keys and values."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.qkv = nnx.LinearGeneral(EMBED, (3, HEADS, DIM), rngs=rngs)
        self.proj = nnx.LinearGeneral((HEADS, DIM), EMBED, axis=(-2, -1), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        q, k, v = jnp.moveaxis(self.qkv(x), 1, 0)  # [T, H, D] each
        scores = jnp.einsum("thd,shd->hts", q, k) / np.float32(np.sqrt(DIM))
        scores = jnp.where(jnp.tri(len(x), dtype=bool), scores, -jnp.inf)
        return self.proj(jnp.einsum("hts,shd->thd", jax.nn.softmax(scores), v))


class Layer(nnx.Module):
    """A layer of GPT-2."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.ln1, self.ln2 = (nnx.LayerNorm(EMBED, epsilon=1e-5, rngs=rngs) for _ in range(2))
        self.attn = Attention(rngs)
        self.fc_in, self.fc_out = (
            nnx.Linear(EMBED, 4 * EMBED, rngs=rngs),
            nnx.Linear(4 * EMBED, EMBED, rngs=rngs),
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attn(self.ln1(x))
        return x + self.fc_out(jax.nn.gelu(self.fc_in(self.ln2(x)), approximate=True))


class TinyGPT(nnx.Module):
    """A GPT of a training script, with names of its own."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.wte, self.wpe = (
            nnx.Embed(VOCAB, EMBED, rngs=rngs),
            nnx.Embed(CONTEXT, EMBED, rngs=rngs),
        )
        self.layers = nnx.List([Layer(rngs) for _ in range(LAYERS)])
        self.ln_f = nnx.LayerNorm(EMBED, epsilon=1e-5, rngs=rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        x = self.wte(ids) + self.wpe(jnp.arange(len(ids)))
        for layer in self.layers:
            x = layer(x)
        return self.wte.attend(self.ln_f(x))


def linear(source: str, path: str, *changes: Mapping) -> list[Mapping]:
    kernel = {
        "source": f"model/{source}/kernel",
        "parameter": f"{path}.kernel",
        "operations": list(changes),
    }
    return [kernel, {"source": f"model/{source}/bias", "parameter": f"{path}.bias"}]


def norm(source: str, path: str) -> list[Mapping]:
    rows = (("scale", "scale"), ("bias", "bias"))
    return [
        {"source": f"model/{source}/{theirs}", "parameter": f"{path}.{ours}"}
        for theirs, ours in rows
    ]


def third(number: int, name: str) -> list[Mapping]:
    at = "model/layers/{layer}/attn/qkv"
    kernel = [{"pick": [1, number]}, {"reshape": [EMBED, -1]}]
    return [
        {
            "source": f"{at}/kernel",
            "parameter": f"blocks.attention.{name}.kernel",
            "operations": kernel,
        },
        {
            "source": f"{at}/bias",
            "parameter": f"blocks.attention.{name}.bias",
            "operations": [{"pick": [0, number]}, {"reshape": [-1]}],
        },
    ]


ROWS: list[Mapping] = [
    {"source": "model/wte/embedding", "parameter": "embedding.table"},
    {"source": "model/wpe/embedding", "parameter": "positions.table"},
    *norm("layers/{layer}/ln1", "blocks.attention_norm"),
    *third(0, "query"),
    *third(1, "key"),
    *third(2, "value"),
    *linear("layers/{layer}/attn/proj", "blocks.attention.out", {"reshape": [-1, EMBED]}),
    *norm("layers/{layer}/ln2", "blocks.mlp_norm"),
    *linear("layers/{layer}/fc_in", "blocks.mlp.up"),
    *linear("layers/{layer}/fc_out", "blocks.mlp.down"),
    *norm("ln_f", "final_norm"),
]


IDS = np.arange(30) % 11


@nnx.jit
def train() -> tuple[TinyGPT, nnx.Optimizer[TinyGPT], jax.Array]:
    """A model after a step of training, its optimiser, and its logits of `IDS`."""
    model = TinyGPT(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.5, momentum=0.9), wrt=nnx.Param)

    def loss(model: TinyGPT) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(
            model(IDS[:-1]), jnp.asarray(IDS[1:])
        ).mean()

    optimizer.update(model, nnx.grad(loss)(model))
    return model, optimizer, model(jnp.asarray(IDS))


def save_steps(folder: Path, last: Mapping) -> Path:
    """Save a step of zeros, then `last`, with a `CheckpointManager`."""
    with ocp.CheckpointManager(folder) as manager:
        manager.save(1, args=ocp.args.StandardSave(jax.tree.map(np.zeros_like, last)))
        manager.save(2, args=ocp.args.StandardSave(last))
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the state of the module with random values, and of a copy as optimiser state."""
    draw = np.random.default_rng(0)
    shapes = nnx.state(nnx.eval_shape(lambda: TinyGPT(nnx.Rngs(0))))
    state = jax.tree.map(lambda leaf: draw.standard_normal(leaf.shape).astype(np.float32), shapes)
    return save_steps(
        tmp_path_factory.mktemp("saved"),
        {"model": state, "opt": {"mu": state, "step": np.array(2)}},
    )


def served(checkpoint: Path, directory: Path, content: object) -> Path:
    """A model directory with the checkpoint and mapping.json."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    (directory / MAPPING).write_text(json.dumps(content))
    (directory / PARAMS).symlink_to(checkpoint)
    return directory


def test_the_state_of_an_nnx_module(checkpoint: Path, tmp_path: Path) -> None:
    """Two parameters by hand; the logits of the next test depend on all."""
    decoder = load_decoder(
        served(checkpoint, tmp_path / "model", {"rows": ROWS}), dtype="float32", mesh=mesh_of(2)
    )
    saved = nnx.state(nnx.eval_shape(lambda: TinyGPT(nnx.Rngs(0))))
    with ocp.CheckpointManager(checkpoint) as manager:
        state = manager.restore(2, args=ocp.args.StandardRestore())["model"]
    assert saved.keys() == state.keys()
    keys = np.stack(
        [
            state["layers"][str(layer)]["attn"]["qkv"]["kernel"]["value"][:, 1]
            for layer in range(LAYERS)
        ]
    )
    np.testing.assert_array_equal(
        np.asarray(decoder.blocks.attention.key.kernel[...]), keys.reshape(LAYERS, EMBED, -1)
    )
    np.testing.assert_array_equal(
        np.asarray(decoder.positions.table[...]), state["wpe"]["embedding"]["value"]
    )


@pytest.mark.slow
def test_training_and_its_logits(tmp_path: Path) -> None:
    model, optimizer, expected = train()
    folder = save_steps(
        tmp_path / "steps", {"model": nnx.state(model), "opt": nnx.state(optimizer)}
    )
    decoder = load_decoder(
        served(folder, tmp_path / "model", {"rows": ROWS}), dtype="float32", mesh=mesh_of(1)
    )
    theirs = np.asarray(expected)
    assert np.abs(logits(decoder, IDS) - theirs).max() <= 2e-5 * np.abs(theirs).max()


def linen_tree(*, scanned: bool) -> Mapping:
    """The weights of a reference model as a Linen module would have them."""
    tensors, tree = load_file(REFERENCE / NAME / "model.safetensors"), {}
    found: dict[str, list[np.ndarray]] = {}
    for key, value in sorted(tensors.items()):
        parts = key.removeprefix("transformer.").split(".")
        if parts[0] == "h":
            found.setdefault("/".join(parts[2:]), []).append(value)
        else:
            put(tree, "/".join(parts), value)
    for key, values in found.items():
        if scanned:
            put(tree, f"h/{key}", np.stack(values, axis=-1))
        else:
            for layer, value in enumerate(values):
                put(tree, f"h_{layer}/{key}", value)
    return {"params": tree}


def linen_rows(*, scanned: bool) -> list[Mapping]:
    """Rows for it; the layers are the last axis of scanned arrays."""
    rows: list[Mapping] = [
        {"source": "params/wte/weight", "parameter": "embedding.table"},
        {"source": "params/wpe/weight", "parameter": "positions.table"},
    ]
    kinds: list[tuple[str, str, list[tuple[str, list[Mapping]]]]] = [
        ("ln_1", "attention_norm", []),
        ("ln_2", "mlp_norm", []),
        ("attn/c_proj", "attention.out", []),
        ("mlp/c_fc", "mlp.up", []),
        ("mlp/c_proj", "mlp.down", []),
    ]
    at = "params/h" if scanned else "params/h_{layer}"

    def of_layers(source: str, path: str, axes: int, *changes: Mapping) -> Mapping:
        row = {
            "source": f"{at}/{source}",
            "parameter": f"blocks.{path}",
            "operations": list(changes),
        }
        return {**row, "layer_axis": axes} if scanned else row

    for source, path, _ in kinds:
        name, axes = ("scale", 1) if "norm" in path else ("kernel", 2)
        rows += [
            of_layers(f"{source}/weight", f"{path}.{name}", axes),
            of_layers(f"{source}/bias", f"{path}.bias", 1),
        ]
    for number, name in enumerate(("query", "key", "value")):
        start, stop = number * 48, (number + 1) * 48
        rows += [
            of_layers(
                "attn/c_attn/weight", f"attention.{name}.kernel", 2, {"part": [1, start, stop]}
            ),
            of_layers("attn/c_attn/bias", f"attention.{name}.bias", 1, {"part": [0, start, stop]}),
        ]
    rows += [
        {"source": f"params/ln_f/{theirs}", "parameter": f"final_norm.{ours}"}
        for theirs, ours in (("weight", "scale"), ("bias", "bias"))
    ]
    return rows


@pytest.mark.parametrize("scanned", [True, False])
def test_a_linen_module(tmp_path: Path, scanned: bool) -> None:
    directory = model_directory(NAME, tmp_path / "model")
    (directory / MAPPING).write_text(json.dumps({"rows": linen_rows(scanned=scanned)}))
    tree = {**linen_tree(scanned=scanned), "batch_stats": np.zeros(2)}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(directory / PARAMS, tree)
    assert_equals_reference(directory, NAME, 2)


Change = Callable[[list[Mapping]], object]
EXPECTED: dict[str, tuple[Change, str]] = {
    "an unknown parameter": (
        lambda rows: rows[0].update(parameter="embedding.tabel"),
        "embedding.tabel: not a parameter of the model; did you mean embedding.table?",
    ),
    "no row": (lambda rows: rows.pop(1), "positions.table [48, 16]: no row has this parameter"),
    "an array without a row": (lambda rows: rows.pop(1), "model/wpe/embedding: unexpected"),
    "a missing array": (
        lambda rows: rows[2].update(source="model/layers/{layer}/ln9/scale"),
        "model/layers/0/ln9/scale: missing",
    ),
    "a shape": (
        lambda rows: rows[0].update(operations=[{"transpose": [1, 0]}]),
        "model/wte/embedding: shape [16, 50], embedding.table needs [50, 16]",
    ),
    "a reshape": (
        lambda rows: rows[0].update(operations=[{"reshape": [7, -1]}]),
        "model/wte/embedding: shape [50, 16] cannot be reshaped to [7, -1]; embedding.table needs [50, 16]",
    ),
    "layers": (
        lambda rows: rows[2].update(source="model/ln_f/scale"),
        "blocks.attention_norm.scale: has all layers; give {layer} in the source model/ln_f/scale, or layer_axis",
    ),
    "no layers": (
        lambda rows: rows[0].update(source="model/layers/{layer}/ln1/scale"),
        "embedding.table: has no layers, but the source model/layers/{layer}/ln1/scale has",
    ),
    "an axis of layers": (
        lambda rows: rows[2].update(source="model/ln_f/scale", layer_axis=3),
        "model/ln_f/scale: shape [16] has no axis 3 for the layers; blocks.attention_norm.scale needs [2, 16]",
    ),
}


@pytest.mark.parametrize("kind", EXPECTED)
def test_rows_that_do_not_fit(kind: str, checkpoint: Path, tmp_path: Path) -> None:
    change, problem = EXPECTED[kind]
    rows: list[Mapping] = json.loads(json.dumps(ROWS))
    change(rows)
    directory = served(checkpoint, tmp_path / "model", {"rows": rows})
    assert problem in refusal(directory).problems


def test_arrays_to_ignore(checkpoint: Path, tmp_path: Path) -> None:
    directory = served(
        checkpoint, tmp_path / "model", {"rows": ROWS[:-1], "ignore": ["model/ln_f"]}
    )
    assert refusal(directory).problems == ("final_norm.bias [16]: no row has this parameter",)


def test_no_rows_list_all_parameters_and_arrays(checkpoint: Path, tmp_path: Path) -> None:
    problems = refusal(served(checkpoint, tmp_path / "model", {"rows": []})).problems
    assert "blocks.mlp.up.kernel [2, 16, 64]: no row has this parameter" in problems
    assert "model/layers/1/attn/qkv/kernel: unexpected" in problems


PAGE = Path(__file__).parents[3] / "docs" / "own_models.md"


def test_the_mappings_of_the_page_are_read(tmp_path: Path) -> None:
    blocks = [block.split("```")[0] for block in PAGE.read_text().split("```json")[1:]]
    for block in blocks:
        (tmp_path / MAPPING).write_text(block)
        assert read_mapping(tmp_path) is not None
    operations = [
        line.split("`")[1] for line in PAGE.read_text().splitlines() if line.startswith('| `{"')
    ]
    rows = [{"source": "a", "parameter": "b", "operations": list(map(json.loads, operations))}]
    (tmp_path / MAPPING).write_text(json.dumps({"rows": rows}))
    mapping = read_mapping(tmp_path)
    assert len(blocks) == 2 and mapping is not None and mapping.rows is not None
    assert {type(operation) for operation in mapping.rows.rows[0].operations} == set(
        OF_ROWS.values()
    )


WRONG: dict[str, tuple[object, str]] = {
    "no JSON": ("{", "cannot be read as JSON"),
    "too large": (" " * 2**20 + "{}", "at most 1048576 bytes"),
    "a list": ([], "must be a JSON object"),
    "neither": ({}, 'either "rows" or "table"'),
    "both": ({"rows": ROWS, "table": "maxtext"}, 'either "rows" or "table"'),
    "a key": (
        {"rows": ROWS, "ignored": []},
        "ignored is not one of rows, ignore; did you mean ignore?",
    ),
    "no rows": ({"rows": {}}, "rows must be a list of JSON objects, got {}"),
    "a row": ({"rows": ["a"]}, "rows[0] must be a JSON object, got 'a'"),
    "a key of a row": (
        {"rows": [{"sources": "a"}]},
        "rows[0]: sources is not one of source, parameter",
    ),
    "no source": (
        {"rows": [{"parameter": "a"}]},
        "rows[0]: source must be a non-empty string, got None",
    ),
    "an axis": (
        {"rows": [{"source": "a", "parameter": "b", "layer_axis": -1}]},
        "rows[0]: layer_axis must be",
    ),
    "layers twice": (
        {"rows": [{"source": "{layer}", "parameter": "b", "layer_axis": 0}]},
        "must have no {layer}",
    ),
    "twice": (
        {"rows": [{"source": "a", "parameter": "b"}] * 2},
        "b is the parameter of several rows",
    ),
    "ignored": (
        {"rows": [{"source": "a", "parameter": "b"}], "ignore": "a"},
        "ignore must be a list of strings",
    ),
    "a table": ({"table": "levanter"}, "table must be one of maxtext, tunix, got 'levanter'"),
    "an option": (
        {"table": "maxtext", "options": {"scan": 1}},
        "options: scan is not one of param_scan_axis",
    ),
    "a value": (
        {"table": "maxtext", "options": {"param_scan_axis": 2}},
        "param_scan_axis must be one of 0, 1, got 2",
    ),
    "other options": ({"table": "tunix", "options": {"a": 1}}, "only the table maxtext has any"),
}
OPERATIONS: dict[str, tuple[object, str]] = {
    "a list": ("transpose", "operations must be a list, got 'transpose'"),
    "an object": (
        ["transpose"],
        "operations[0] must be a JSON object with one key, got 'transpose'",
    ),
    "unknown": ([{"transposed": [1, 0]}], "transposed is not one of reshape, transpose"),
    "sizes": ([{"reshape": [-1, -1]}], "reshape must be a list of sizes, got [-1, -1]"),
    "axes": ([{"transpose": [True, 0]}], "transpose must be a list of axes"),
    "a part": (
        [{"part": [0, 1]}],
        "part must be a list of an axis, the first entry and the end, or null",
    ),
    "a pick": ([{"pick": 1}], "pick must be a list of an axis and an entry"),
    "halves": ([{"halves": "0"}], "halves must be an axis, got '0'"),
    "a scale": ([{"scale": None}], "scale must be a number, got None"),
}
WRONG |= {
    f"operations: {kind}": (
        {"rows": [{"source": "a", "parameter": "b", "operations": value}]},
        words,
    )
    for kind, (value, words) in OPERATIONS.items()
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_mapping(kind: str, tmp_path: Path) -> None:
    content, words = WRONG[kind]
    (tmp_path / MAPPING).write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ConfigError) as caught:
        read_mapping(tmp_path)
    assert str(caught.value).startswith("mapping.json: ") and words in str(caught.value)


def test_a_tree_without_a_table_names_keys_and_the_mapping(
    checkpoint: Path, tmp_path: Path
) -> None:
    directory = served(checkpoint, tmp_path / "model", {})
    (directory / MAPPING).unlink()
    (problem,) = refusal(directory).problems
    assert "the tree has model/layers/0/attn/proj/bias, model/layers/0/attn/proj/kernel" in problem
    assert "write mapping.json (docs/own_models.md)" in problem
