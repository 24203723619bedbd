"""A decoder of one's own is loaded, split and checked like the package's. Its code comes from the user's settings."""

import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

from orca_jax import LLM, SamplingParams
from orca_jax.assembly.engine import build_engine
from orca_jax.assembly.support import Facts, check_support
from orca_jax.exec import programs
from orca_jax.exec.program_store import ProgramStore
from orca_jax.helpers.orbax_names import PARAMS
from orca_jax.model.describe import read_model_config
from orca_jax.model.layers import Table
from orca_jax.model.load import abstract_decoder, load_decoder, prepare_load
from orca_jax.model.maker import Maker
from orca_jax.model.own import OwnDecoder, own_class, own_config
from orca_jax.model.parameters import flat_parameters
from orca_jax.model.sharding import can_share, most_shards
from orca_jax.model.trees.rows import Transpose, TreeRow
from orca_jax.values.cache_spec import one_group
from orca_jax.values.config import CacheConfig, EngineConfig, ExecutorConfig, ModelConfig
from orca_jax.values.errors import ConfigError
from orca_jax.values.startup import StartTimes
from tests.assembly.divisible import check_divisible
from tests.covering import slow
from tests.model.reference import REFERENCE, logits, mesh_of

EXAMPLE = f"{Path(__file__).parents[2] / 'examples' / 'own_decoder.py'}:SquaredReluGPT"
PLAIN = f"{__name__}:Plain"


class Plain(OwnDecoder):
    """A decoder of plain modules of flax: nothing has axes but the table of tokens."""

    def __init__(self, config: ModelConfig, make: Maker, vocab_rows: int) -> None:
        self.embedding = Table(make, vocab_rows, config.embed_dim, "vocab", used=config.vocab_size)
        self.heads = config.num_heads
        self.layers = nnx.List(
            [
                nnx.Linear(config.embed_dim, 3 * config.embed_dim, rngs=make.rngs)
                for _ in range(config.num_layers)
            ]
        )

    @classmethod
    def config_from_json(cls, values: Mapping[str, Any]) -> ModelConfig:
        return own_config(
            vocab_size=50, num_layers=2, embed_dim=8, num_heads=2, max_positions=values["context"]
        )

    @classmethod
    def tree_rows(cls, config: ModelConfig) -> tuple[TreeRow, ...]:
        layer = TreeRow("stack/kernel", "layers.{layer}.kernel", (Transpose((1, 0)),), 2)
        bias = TreeRow("bias_{layer}", "layers.{layer}.bias")
        return TreeRow("tokens", "embedding.table"), layer, bias

    def __call__(
        self, inputs: Any, positions: Any, attend: Any, cache: Any, keep: Any = None
    ) -> Any:
        x = self.embedding(inputs)
        for number, layer in enumerate(self.layers):
            q, k, v = jnp.split(layer(x), 3, axis=-1)
            out, cache = attend(
                jnp.int32(number),
                *(part.reshape(len(x), self.heads, -1) for part in (q, k, v)),
                cache,
            )
            x = x + out.reshape(len(x), -1)
        return (x if keep is None else x[keep]), cache

    @property
    def unembedding(self) -> Table:
        return self.embedding


class WithDropout(Plain):
    def __init__(self, config: ModelConfig, make: Maker, vocab_rows: int) -> None:
        super().__init__(config, make, vocab_rows)
        self.dropout = nnx.Dropout(0.1, rngs=make.rngs)


class WithAnotherHead(Plain):
    @property
    def unembedding(self) -> Any:
        return self.layers[0]


class WithAnotherAxis(Plain):
    def __init__(self, config: ModelConfig, make: Maker, vocab_rows: int) -> None:
        super().__init__(config, make, vocab_rows)
        self.extra = make((3,), ("experts_of_mine",), "ones")


class WithError(Plain):
    def __init__(self, config: ModelConfig, make: Maker, vocab_rows: int) -> None:
        raise IndexError("no such layer\nat all")


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model directory that the example writes."""
    directory = tmp_path_factory.mktemp("example")
    module: Any = sys.modules[own_class(EXAMPLE).__module__]
    module.save_untrained(directory)
    return directory


def test_the_example_serves_its_training_checkpoint(example: Path) -> None:
    """The names of parameters are those of the stored tree. Splitting it changes nothing but rounding."""
    config = read_model_config(example, EXAMPLE)
    with ocp.CheckpointManager(example / PARAMS) as manager:
        saved = manager.restore(1000, args=ocp.args.StandardRestore())["model"]
    one, four = (
        load_decoder(example, dtype="float32", mesh=mesh_of(size), config=config) for size in (1, 4)
    )
    np.testing.assert_array_equal(
        np.asarray(one.head.table[...])[:258], saved["head"]["table"]["value"]
    )
    up = four.layers[1].up.kernel
    np.testing.assert_array_equal(
        np.asarray(up[...]), saved["layers"]["1"]["up"]["kernel"]["value"]
    )
    assert up[...].sharding.shard_shape(up[...].shape) == (32, 128 // 4)
    ids = np.arange(20) * 7 % 250
    ours = logits(one, ids)
    np.testing.assert_allclose(logits(four, ids), ours, atol=2e-6)
    # each token sees those before it alone
    np.testing.assert_allclose(logits(one, ids[:9]), ours[:9], atol=2e-6)


@pytest.mark.usefixtures("few_programs", "compiled_when_used", "quick_compiles")
@pytest.mark.parametrize("devices", [1, slow(2)])
def test_the_example_in_an_engine(example: Path, devices: int) -> None:
    """Its tokens depend neither on devices nor on cached prefixes, and are those of the logits."""
    settings: dict[str, Any] = {
        "tokenizer": "byte",
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "page_size": 16,
    }
    prompt, params = list(range(40)), SamplingParams(max_tokens=8, temperature=0.0)
    decoder = load_decoder(
        example, dtype="float32", mesh=mesh_of(1), config=read_model_config(example, EXAMPLE)
    )
    with LLM(
        str(example), decoder=EXAMPLE, tensor_parallel_size=devices, progress=False, **settings
    ) as llm:
        first, again = (llm.generate([prompt], params, use_tqdm=False)[0] for _ in range(2))
        assert llm.engine.pool.num_cache_hits == 39  # two pages, and the third but its last token
    ids = list(first.outputs[0].token_ids)
    assert list(again.outputs[0].token_ids) == ids
    whole = logits(decoder, np.array([*prompt, *ids]))
    assert whole.argmax(axis=1)[len(prompt) - 1 : -1].tolist() == ids


def plain_directory(folder: Path) -> Path:
    (folder / "config.json").write_text('{"context": 48}')
    draw = np.random.default_rng(0)
    tree = {
        name: draw.standard_normal(shape)
        for name, shape in (("tokens", (50, 8)), ("bias_0", 24), ("bias_1", 24))
    }
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(
            folder / PARAMS,
            {"params": {**tree, "stack": {"kernel": draw.standard_normal((24, 8, 2))}}},
        )
    return folder


def test_modules_of_flax_and_rows_of_the_class(tmp_path: Path) -> None:
    """Parameters without axes are copied to each device; all have the type of the weights."""
    directory = plain_directory(tmp_path)
    config = read_model_config(directory, PLAIN)
    assert (config.decoder, config.family, config.mlp_dim, config.head_dim) == (PLAIN, "own", 32, 4)
    decoder = load_decoder(directory, dtype="bfloat16", mesh=mesh_of(2), config=config)
    values = flat_parameters(nnx.state(decoder))
    assert {value.dtype.name for value in values.values()} == {"bfloat16"}
    with ocp.StandardCheckpointer() as checkpointer:
        saved = checkpointer.restore(directory / PARAMS)["params"]
    kernel = values["layers.1.kernel"]
    np.testing.assert_array_equal(
        np.asarray(kernel), saved["stack"]["kernel"][..., 1].T.astype(kernel.dtype)
    )
    assert (
        kernel.sharding.is_fully_replicated
        and not values["embedding.table"].sharding.is_fully_replicated
    )
    np.testing.assert_array_equal(
        np.asarray(values["layers.1.bias"]), saved["bias_1"].astype(kernel.dtype)
    )


def test_errors_name_the_setting(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "broken.py").write_text("import nothing_of_this_name\n")
    expected = {
        "Plain": "must be MODULE:CLASS or FILE.py:CLASS, got 'Plain'",
        "no_such_module:A": "there is no module no_such_module; start in its folder, or give FILE.py:CLASS",
        f"{tmp_path}/none.py:A": "none.py is not a file",
        f"{tmp_path}/broken.py:A": "broken.py cannot be imported: ModuleNotFoundError: No module named 'nothing_of",
        f"{__name__}:Nothing": "has no class Nothing at its top",
        f"{__name__}:Path": "is not a subclass of orca_jax.model.own.OwnDecoder",
        PLAIN: f"config.json: context is missing, which {PLAIN} reads",
    }
    for name, words in expected.items():
        with pytest.raises(ConfigError) as caught:
            read_model_config(tmp_path, name)
        assert words in str(caught.value), name
        assert caught.value.param == ("model" if name == PLAIN else "decoder")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "WithDropout",
            "dropout.rngs.count is a RngCount; a served decoder has parameters only, and no dropout",
        ),
        ("WithAnotherHead", "unembedding must be a Table of shape [128, 8]"),
        (
            "WithAnotherAxis",
            "extra of shape [3] has the axes ('experts_of_mine',); each must be one of layers, ",
        ),
        ("WithError", "cannot be made: IndexError: no such layer"),
    ],
)
def test_decoders_that_cannot_be_served(name: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"context": 48}')
    config = read_model_config(tmp_path, f"{__name__}:{name}")
    with pytest.raises(ConfigError) as caught:
        abstract_decoder(config, "float32", mesh_of(1))
    assert words in str(caught.value) and caught.value.param == "decoder"


def test_stages_and_copies_of_heads_are_refused(example: Path) -> None:
    config = read_model_config(example, EXAMPLE)
    with pytest.raises(ConfigError, match="a decoder of your own has all layers in one stage"):
        check_support(
            Facts(EngineConfig(decoder=EXAMPLE, pipeline_parallel_size=2), model=config), "settings"
        )
    assert can_share(config, 4) and most_shards(config, 8) == 4
    with pytest.raises(
        ConfigError, match="is more than 4 key/value heads, which your decoder cannot copy"
    ):
        check_divisible(config, 8)


def test_several_hosts_are_refused(example: Path) -> None:
    with pytest.raises(ConfigError, match="decoder needs nnodes 1") as caught:
        build_engine(
            EngineConfig(str(example), decoder=EXAMPLE),
            host=cast(Any, SimpleNamespace(num_hosts=2)),
        )
    assert caught.value.param == "decoder"


def test_safetensors_are_refused() -> None:
    config = own_config(
        vocab_size=9, num_layers=1, embed_dim=4, num_heads=1, max_positions=8, decoder=PLAIN
    )
    with pytest.raises(ConfigError, match="a decoder of your own reads Orbax checkpoints"):
        prepare_load(REFERENCE / "qwen3", dtype="float32", config=config)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_layers": 0}, "num_layers must be a positive integer, got 0"),
        ({"num_kv_heads": 3}, "does not divide"),
    ],
)
def test_sizes_are_checked(changes: dict[str, int], words: str) -> None:
    sizes = {"vocab_size": 9, "num_layers": 1, "embed_dim": 8, "num_heads": 4, "max_positions": 8}
    with pytest.raises(ConfigError, match=words):
        own_config(**{**sizes, **changes})


@pytest.mark.parametrize("is_own", [True, False])
def test_the_store_of_programs_has_none_of_them(
    is_own: bool, example: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store finds programs by the code of the package, and the user's code may depend on anything."""
    directories: list[str | None] = []

    def store(directory: str | None, *rest: Any) -> ProgramStore:
        directories.append(directory)
        return ProgramStore(None, *rest)

    monkeypatch.setattr(programs, "ProgramStore", store)
    monkeypatch.setattr(programs, "compile_all", lambda *_: {})
    source, name = (example, EXAMPLE) if is_own else (REFERENCE / "qwen3", None)
    mesh = mesh_of(1)
    shapes = prepare_load(source, dtype="float32", config=read_model_config(source, name)).shapes(
        mesh
    )
    config = ExecutorConfig(
        "float32",
        1,
        (4,),
        2,
        32,
        CacheConfig(one_group(shapes.config.layer_caches), (4,), 16, "float32"),
        compile_cache="kept",
    )
    programs.Programs(shapes, config, mesh).compile(lambda *_: None, StartTimes())
    assert directories == [None if is_own else "kept"]
