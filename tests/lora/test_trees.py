"""Adapters of Tunix's trees in memory: the arrays are those of PEFT, and nothing else is copied."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from orca_jax import LLM, LoRARequest, SamplingParams
from orca_jax.assembly.weights import split_adapters
from orca_jax.exec.stage import Stage
from orca_jax.model.describe import read_model_config
from orca_jax.model.lora import trees
from orca_jax.model.lora.peft_files import WEIGHTS, read_adapter
from orca_jax.model.lora.trees import read_tree
from orca_jax.model.trees.memory import nested
from orca_jax.values.config import LoraConfig, ModelConfig
from orca_jax.values.errors import CheckpointError, RequestError
from orca_jax.values.lora_request import AdapterTree
from tests.lora.directories import write_adapter
from tests.model.reference import REFERENCE

pytestmark = pytest.mark.usefixtures("compiled_once", "few_programs", "quick_compiles")

LORA = LoraConfig(num_slots=2, max_rank=4)
RANK = 2
PROMPT = [5, 9, 2, 7, 7, 1]
PARAMS = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, logprobs=0)


def as_tunix(folder: Path, model: ModelConfig) -> dict[str, Any]:
    """The adapter of a folder in Tunix's layout, by the einsums of its modules."""
    tensors = load_file(folder / WEIGHTS)
    heads = {"q": model.num_heads, "k": model.num_kv_heads, "v": model.num_kv_heads}
    leaves = {}
    for layer in range(model.num_layers):
        at = f"base_model.model.model.layers.{layer}"
        own = f"layers/{layer}"

        def pair(module: str, at: str = at) -> tuple[np.ndarray, np.ndarray]:
            a, b = (tensors[f"{at}.{module}.lora_{side}.weight"].T for side in "AB")
            return a, b

        found = {}
        qkv = {short: pair(f"self_attn.{short}_proj") for short in "qkv"}
        split = {
            short: each[1].reshape(RANK, heads[short], model.head_dim)
            for short, each in qkv.items()
        }
        out, down = pair("self_attn.o_proj"), pair("mlp.down_proj")
        wide = out[0].reshape(model.num_heads, model.head_dim, RANK)
        if model.family.startswith("gemma"):
            found["attn/q_einsum/w"] = (qkv["q"][0], split["q"])
            joint = np.stack([split["k"], split["v"]], axis=1)
            found["attn/kv_einsum/w"] = (qkv["k"][0], joint)
            found["attn/attn_vec_einsum/w"] = (wide, out[1])
        else:
            found |= {f"attn/{short}_proj/w": (qkv[short][0], split[short]) for short in "qkv"}
            found["attn/o_proj/w"] = (wide, out[1])
        found["mlp/down_proj/kernel"] = down
        found |= {f"mlp/{part}_proj/kernel": pair(f"mlp.{part}_proj") for part in ("gate", "up")}
        for name, (a, b) in found.items():
            leaves[tuple(f"{own}/{name}_lora_a".split("/"))] = jnp.asarray(a)
            leaves[tuple(f"{own}/{name}_lora_b".split("/"))] = jnp.asarray(b)
    return nested(leaves)


def folder_of(folder: Path, name: str, seed: int) -> Path:
    """A random adapter in PEFT's format whose keys and values have one matrix A, as in Gemma's einsum."""
    made = write_adapter(folder, seed, rank=RANK, base=REFERENCE / name)
    tensors = load_file(made / WEIGHTS)
    for key in tensors:
        if key.endswith("k_proj.lora_A.weight"):
            tensors[key.replace("k_proj", "v_proj")] = tensors[key]
    save_file(tensors, made / WEIGHTS)
    return made


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("name", ["gemma3", "qwen3", "llama-12-heads-3-groups"])
def test_the_arrays_are_those_of_peft(name: str, copies: int, tmp_path: Path) -> None:
    model = read_model_config(str(REFERENCE / name))
    folder = folder_of(tmp_path / "peft", name, 3)
    tree = AdapterTree(as_tunix(folder, model), 2.0 * RANK)
    heads = model.num_kv_heads * copies
    held = replace(model, num_kv_heads=heads, kv_copies=copies)
    wanted = read_adapter(folder, held, LORA, "float32")
    found = read_tree(tree, held, LORA, "float32")
    assert found.values.keys() == wanted.values.keys() and found.rank == RANK
    for key, values in wanted.values.items():
        np.testing.assert_array_equal(found.values[key], values, err_msg=key)


def test_wrong_trees_are_refused_by_name(tmp_path: Path) -> None:
    model = read_model_config(str(REFERENCE / "qwen3"))
    good = as_tunix(folder_of(tmp_path / "peft", "qwen3", 3), model)

    def problems(change: Mapping[str, Any], first: str = "q_proj") -> str:
        attention = dict(good["layers"]["0"]["attn"])
        attention[first] = {**attention.get(first, {}), **change}
        tree = {"layers": {"0": {"attn": attention}}}
        with pytest.raises(CheckpointError) as caught:
            read_tree(AdapterTree(tree, 4.0), model, LORA, "float32")
        return "\n".join(caught.value.problems)

    a = good["layers"]["0"]["attn"]["q_proj"]["w_lora_a"]
    assert "layers/0/attn/q_proj/w: has values that" in problems({"w_lora_a": a * jnp.nan})
    assert "layers/0/attn/q_proj/w: shapes" in problems({"w_lora_a": a[1:]})
    assert "rank 5 is more than max_lora_rank 4" in problems({"w_lora_a": jnp.ones((4, 5))})
    assert "w is not an array" not in problems({"w_lora_a": "text"})
    assert "str is not an array" in problems({"w_lora_a": "text"})
    assert "layers/0/attn/other/w: no linear layer" in problems({"w_lora_a": a}, "other")
    assert "_lora_a and _lora_b must both" in problems({"v_lora_a": a, "w_lora_b": a[:0]})
    with pytest.raises(CheckpointError, match="it has no adapters"):
        read_tree(AdapterTree({"layers": {}}, 4.0), model, LORA, "float32")


def test_adapters_are_told_from_weights() -> None:
    class Linear(nnx.Module):
        def __init__(self) -> None:
            self.w = nnx.Param(jnp.ones(2))
            self.w_lora_a = nnx.LoRAParam(jnp.ones(3))

    weights, adapter = split_adapters(nnx.state(Linear(), nnx.Param))
    assert list(weights) == ["w"] and list(adapter) == ["w_lora_a"]


@pytest.fixture
def llm() -> Iterator[LLM]:
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "page_size": 8, "num_pages": 40}
    with LLM(
        str(REFERENCE / "qwen3"),
        tokenizer="byte",
        dtype="float32",
        enable_lora=True,
        max_loras=2,
        max_lora_rank=RANK,
        **settings,
    ) as made:
        yield made


def tokens(llm: LLM, request: LoRARequest | None) -> tuple[int, list[float]]:
    (output,) = llm.generate([PROMPT], PARAMS, use_tqdm=False, lora_request=request)
    entries = zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True)
    return output.weight_version, [entry[token].logprob for token, entry in entries]


def test_an_update_copies_the_adapters_bytes_alone(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [folder_of(tmp_path / str(seed), "qwen3", seed) for seed in (3, 4)]
    made = [as_tunix(folder, llm._built.model_config) for folder in folders]
    wanted = [tokens(llm, LoRARequest(folder.name, str(folder)))[1] for folder in folders]
    plain = tokens(llm, None)[1]
    host: list[int] = []
    devices: list[int] = []
    read, write = trees.on_host, Stage.write_adapter

    def counted(array: Any) -> np.ndarray:
        host.append(array.nbytes)
        return read(array)

    def written(self: Stage, slot: int, values: Mapping[str, np.ndarray]) -> None:
        devices.append(sum(each.nbytes for name, each in values.items() if name != "active"))
        write(self, slot, values)

    monkeypatch.setattr(trees, "on_host", counted)
    monkeypatch.setattr(Stage, "write_adapter", written)
    monkeypatch.setattr(Stage, "put_weight", lambda *_: pytest.fail("a weight was copied"))
    compiles = llm.engine.executor.stats.compiles_while_serving
    for version, (tree, score) in enumerate(zip(made, wanted, strict=True), 1):
        host.clear()
        devices.clear()
        assert llm.update_lora("policy", tree, 2.0 * RANK) == version
        assert tokens(llm, LoRARequest("policy")) == (version, score)
        size = sum(leaf.nbytes for leaf in trees.flat_tree(tree).values())
        assert sum(host) == size and sum(devices) == size
    assert tokens(llm, None)[1] == plain
    assert llm.engine.executor.stats.compiles_while_serving == compiles
    with pytest.raises(RequestError, match="stands for the matrices of update_lora, not for x"):
        tokens(llm, LoRARequest("policy", "x"))
    with pytest.raises(RequestError, match="no adapter is loaded as 'other': give its lora_path"):
        tokens(llm, LoRARequest("other"))


def test_open_requests_keep_their_matrices(llm: LLM, tmp_path: Path) -> None:
    folders = [folder_of(tmp_path / str(seed), "qwen3", seed) for seed in (3, 4)]
    first, second = (as_tunix(folder, llm._built.model_config) for folder in folders)
    wanted = [tokens(llm, LoRARequest(folder.name, str(folder)))[1] for folder in folders]
    llm.update_lora("policy", first, 2.0 * RANK)
    begun = llm.stream([PROMPT], PARAMS, lora_request=LoRARequest("policy"))
    llm._turns.step()
    with pytest.raises(RequestError, match="no adapters: their arrays end in"):
        llm.update_lora("policy", {}, 1.0)
    llm.update_lora("policy", second, 2.0 * RANK)
    assert tokens(llm, LoRARequest("policy")) == (2, wanted[1])
    (output,) = begun
    entries = zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True)
    found = [entry[token].logprob for token, entry in entries]
    assert (output.weight_version, found) == (1, wanted[0])
