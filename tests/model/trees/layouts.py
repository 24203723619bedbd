"""Trees of other programs with the weights of the reference models, written by their own rules.

The functions follow the code of MaxText (`checkpoint_conversion/utils/param_mapping.py`, `layers/attentions.py`) and of
Tunix (`models/*/params.py`), not the tables of the package. `maxtext_logits` is MaxText's forward pass.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
from flax import nnx
from safetensors.numpy import load_file

from orca_jax.model.load import load_decoder
from orca_jax.model.parameters import flat_parameters
from tests.model.reference import REFERENCE, mesh_of

Tree = dict[str, Any]


def hf_weights(name: str) -> tuple[Mapping[str, Any], dict[str, np.ndarray]]:
    """The configuration and the tensors of a reference model."""
    config = json.loads((REFERENCE / name / "config.json").read_text())
    return config, load_file(REFERENCE / name / "model.safetensors")


def put(tree: Tree, path: str, value: np.ndarray) -> None:
    *parents, name = path.split("/")
    for parent in parents:
        tree = tree.setdefault(parent, {})
    tree[name] = value


def model_directory(name: str, folder: Path) -> Path:
    """A model directory with the configuration of a reference model, and no weights."""
    folder.mkdir(exist_ok=True)
    shutil.copy(REFERENCE / name / "config.json", folder)
    return folder


def save_steps(folder: Path, steps: Mapping[int, object], item: str = "items") -> None:
    """Write steps as a `CheckpointManager` with one named tree does."""
    with ocp.CheckpointManager(folder, item_names=(item,)) as manager:
        for step, tree in steps.items():
            manager.save(step, args=ocp.args.Composite(**{item: ocp.args.PyTreeSave(tree)}))
        manager.wait_until_finished()


def assert_equals_reference(
    directory: Path, name: str, devices: int = 1, *, exact: bool = True
) -> None:
    """Compare all parameters with those read from the reference model's safetensors."""
    ours = flat_parameters(
        nnx.state(load_decoder(directory, dtype="float32", mesh=mesh_of(devices)))
    )
    expected = flat_parameters(
        nnx.state(load_decoder(REFERENCE / name, dtype="float32", mesh=mesh_of(devices)))
    )
    assert ours.keys() == expected.keys()
    for path, value in expected.items():
        limit = 0.0 if exact else 1e-6 * float(np.abs(value).max())
        assert ours[path].sharding == value.sharding
        np.testing.assert_allclose(
            np.asarray(ours[path]), np.asarray(value), rtol=0, atol=limit, err_msg=path
        )


def maxtext_tree(
    name: str,
    *,
    scanned: bool = True,
    scan_axis: int = 1,
    pairs: bool = False,
    fused_mlp: bool = False,
    rows: int = 0,
) -> Tree:
    """The parameters of a reference model in MaxText's layout.

    `pairs` is its `rope_type` "llama3.1"; `rows` are rows of padding of the vocabulary.
    """
    hf, tensors = hf_weights(name)
    heads, kv_heads, embed = hf["num_attention_heads"], hf["num_key_value_heads"], hf["hidden_size"]
    dim = hf.get("head_dim") or embed // heads
    folds_scale = hf["model_type"] in ("llama", "mistral", "mixtral")

    def kernel(key: str, *shape: int) -> np.ndarray:  # `reshape_kernel`
        return tensors[key].T.reshape(shape)

    def rotated(values: np.ndarray) -> np.ndarray:  # `adjust_rope`
        if not pairs:
            return values
        first, second = np.split(values, 2, axis=-1)
        return np.stack([first, second], axis=-1).reshape(values.shape)

    def layer(number: int) -> dict[str, np.ndarray]:
        at = f"model.layers.{number}."
        query = rotated(kernel(f"{at}self_attn.q_proj.weight", embed, heads, dim))
        found = {
            "pre_self_attention_layer_norm/scale": tensors[f"{at}input_layernorm.weight"],
            "post_self_attention_layer_norm/scale": tensors[f"{at}post_attention_layernorm.weight"],
            "self_attention/query/kernel": query / np.float32(np.sqrt(dim))
            if folds_scale
            else query,
            "self_attention/key/kernel": rotated(
                kernel(f"{at}self_attn.k_proj.weight", embed, kv_heads, dim)
            ),
            "self_attention/value/kernel": kernel(
                f"{at}self_attn.v_proj.weight", embed, kv_heads, dim
            ),
            "self_attention/out/kernel": kernel(f"{at}self_attn.o_proj.weight", heads, dim, embed),
        }
        found |= maxtext_mlp(hf, tensors, at, fused=fused_mlp)
        for part, size in (("query", heads), ("key", kv_heads), ("value", kv_heads)):
            bias, norm = (
                f"{at}self_attn.{part[0]}_proj.bias",
                f"{at}self_attn.{part[0]}_norm.weight",
            )
            found |= (
                {f"self_attention/{part}/bias": tensors[bias].reshape(size, dim)}
                if bias in tensors
                else {}
            )
            found |= {f"self_attention/{part}_norm/scale": tensors[norm]} if norm in tensors else {}
        return found

    tree: Tree = {}
    layers = [layer(number) for number in range(hf["num_hidden_layers"])]
    for key in layers[0]:
        if scanned:
            put(
                tree,
                f"decoder/layers/{key}",
                np.stack([each[key] for each in layers], axis=scan_axis),
            )
        else:
            for number, each in enumerate(layers):
                put(tree, f"decoder/layers_{number}/{key}", each[key])
    put(tree, "decoder/decoder_norm/scale", tensors["model.norm.weight"])
    table = tensors["model.embed_tokens.weight"]
    put(tree, "token_embedder/embedding", np.pad(table, [(0, rows), (0, 0)]))
    if not hf["tie_word_embeddings"]:
        put(
            tree,
            "decoder/logits_dense/kernel",
            np.pad(tensors["lm_head.weight"].T, [(0, 0), (0, rows)]),
        )
    return tree


def maxtext_mlp(
    hf: Mapping[str, Any], tensors: Mapping[str, np.ndarray], at: str, *, fused: bool
) -> dict[str, np.ndarray]:
    """The MLP of a layer, or its experts, stacked before the layers are."""
    count = hf.get("num_local_experts")
    if count is None:
        gate, up, down = (
            tensors[f"{at}mlp.{part}_proj.weight"].T for part in ("gate", "up", "down")
        )
        if fused:
            return {"mlp/wi/kernel": np.stack([gate, up], 1), "mlp/wo/kernel": down}
        return {"mlp/wi_0/kernel": gate, "mlp/wi_1/kernel": up, "mlp/wo/kernel": down}
    of, block, names = "block_sparse_moe", "MoeBlock_0", ("w1", "w3", "w2")
    if hf["model_type"] == "qwen3_moe":
        of, block, names = "mlp", "moe_block", ("gate_proj", "up_proj", "down_proj")
    found = {f"{block}/gate/kernel": tensors[f"{at}{of}.gate.weight"].T}
    for key, name in zip(("wi_0", "wi_1", "wo"), names, strict=True):
        each = [tensors[f"{at}{of}.experts.{number}.{name}.weight"].T for number in range(count)]
        found[f"{block}/{key}"] = np.stack(each)
    return found


def maxtext_logits(
    tree: Tree, name: str, ids: np.ndarray, frequencies: np.ndarray, *, pairs: bool
) -> np.ndarray:
    """The logits of an unscanned tree by the rules of MaxText, for one sequence."""
    hf, _ = hf_weights(name)
    dim, eps = (
        tree["decoder"]["layers_0"]["self_attention"]["query"]["kernel"].shape[-1],
        hf["rms_norm_eps"],
    )

    def norm(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * scale

    def rotate(x: np.ndarray) -> np.ndarray:  # [T, H, D]
        angles = (np.arange(len(ids))[:, None] * frequencies)[:, None]
        if pairs:  # `LLaMARotaryEmbedding`
            left, right = np.roll(x, -1, axis=-1), np.roll(x, 1, axis=-1)
            shifted = np.where(np.arange(dim) % 2, right, left)
            angles = np.repeat(angles, 2, axis=-1)
            return x * np.cos(angles) + shifted * np.sin(angles) * np.tile([-1, 1], dim // 2)
        first, second = np.split(x, 2, axis=-1)  # `RotaryEmbedding`
        angles = np.concatenate([angles, angles], axis=-1)
        return x * np.cos(angles) + np.concatenate([-second, first], axis=-1) * np.sin(angles)

    x = tree["token_embedder"]["embedding"][ids]
    for number in range(hf["num_hidden_layers"]):
        layer = tree["decoder"][f"layers_{number}"]
        attention, mlp = layer["self_attention"], layer["mlp"]
        inputs = norm(x, layer["pre_self_attention_layer_norm"]["scale"])
        query, key, value = (
            np.einsum("te,ehd->thd", inputs, attention[part]["kernel"])
            for part in ("query", "key", "value")
        )
        key, value = (
            np.repeat(part, query.shape[1] // part.shape[1], axis=1)
            for part in (rotate(key), value)
        )
        scores = np.einsum("thd,shd->hts", rotate(query), key)  # not scaled: the weights are
        scores = np.where(np.tri(len(ids), dtype=bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        x = x + np.einsum("hts,shd,hde->te", weights, value, attention["out"]["kernel"])
        inputs = norm(x, layer["post_self_attention_layer_norm"]["scale"])
        gate = inputs @ mlp["wi_0"]["kernel"]
        x = (
            x
            + (gate / (1 + np.exp(-gate)) * (inputs @ mlp["wi_1"]["kernel"])) @ mlp["wo"]["kernel"]
        )
    return (
        norm(x, tree["decoder"]["decoder_norm"]["scale"])
        @ tree["decoder"]["logits_dense"]["kernel"]
    )


def tunix_tree(name: str) -> Tree:
    """The parameters of a reference model in Tunix's layout, from the rules of `_get_key_and_transform_mapping`."""
    hf, tensors = hf_weights(name)
    heads, kv_heads, embed = hf["num_attention_heads"], hf["num_key_value_heads"], hf["hidden_size"]
    dim = hf.get("head_dim") or embed // heads
    shapes: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
        "q_proj.weight": lambda x: x.T.reshape(embed, heads, dim),
        "k_proj.weight": lambda x: x.T.reshape(embed, kv_heads, dim),
        "v_proj.weight": lambda x: x.T.reshape(embed, kv_heads, dim),
        "o_proj.weight": lambda x: x.T.reshape(heads, dim, embed),
    }
    tree: Tree = {}
    for key, value in tensors.items():
        path = key.removeprefix("model.").replace(".self_attn.", ".attn.")
        end = ".".join(path.split(".")[-2:])
        if path == "embed_tokens.weight":
            put(tree, "embedder/input_embedding", value)
        elif path == "norm.weight":
            put(tree, "final_norm/w", value)
        elif path == "lm_head.weight":
            put(tree, "lm_head/w", value.T)
        elif end in shapes:
            put(tree, path.replace(".weight", ".w").replace(".", "/"), shapes[end](value))
        elif end.endswith("_proj.bias"):
            put(tree, path.replace("_proj.bias", "_bias").replace(".", "/"), value)
        elif ".mlp." in path:
            put(tree, path.replace(".weight", ".kernel").replace(".", "/"), value.T)
        else:
            put(tree, path.replace(".weight", ".w").replace(".", "/"), value)
    return tree


def tunix_gemma_tree(name: str) -> Tree:
    """The parameters of a Gemma in Tunix's layout, from the rules of its `params_safetensors.py`."""
    hf, tensors = hf_weights(name)
    heads, kv_heads, embed = hf["num_attention_heads"], hf["num_key_value_heads"], hf["hidden_size"]
    dim = hf["head_dim"]
    norm = "post_attn_norm" if hf["model_type"] == "gemma2" else "post_attention_norm"
    renamed = {
        "input_layernorm": "pre_attention_norm",
        "post_attention_layernorm": norm,
        "pre_feedforward_layernorm": "pre_ffw_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    }

    def by_head(key: str, size: int) -> np.ndarray:
        return tensors[key].T.reshape(embed, size, dim).transpose(1, 0, 2)

    tree: Tree = {}
    put(tree, "embedder/input_embedding", tensors["model.embed_tokens.weight"])
    put(tree, "final_norm/scale", tensors["model.norm.weight"])
    for layer in range(hf["num_hidden_layers"]):
        theirs = f"model.layers.{layer}."
        ours = f"layers/{layer}/"
        attention = f"{theirs}self_attn."
        query = by_head(f"{attention}q_proj.weight", heads)
        pair = [by_head(f"{attention}{part}_proj.weight", kv_heads) for part in "kv"]
        if heads == kv_heads:
            put(tree, f"{ours}attn/qkv_einsum/w", np.stack([query, *pair]))
        else:
            put(tree, f"{ours}attn/q_einsum/w", query)
            put(tree, f"{ours}attn/kv_einsum/w", np.stack(pair))
        out = tensors[f"{attention}o_proj.weight"].T.reshape(heads, dim, embed)
        put(tree, f"{ours}attn/attn_vec_einsum/w", out)
        for part, short in (("query", "q"), ("key", "k")):
            if (key := f"{attention}{short}_norm.weight") in tensors:
                put(tree, f"{ours}attn/_{part}_norm/scale", tensors[key])
        for part in ("gate", "up", "down"):
            kernel = tensors[f"{theirs}mlp.{part}_proj.weight"].T
            put(tree, f"{ours}mlp/{part}_proj/kernel", kernel)
        for key, own in renamed.items():
            put(tree, f"{ours}{own}/scale", tensors[f"{theirs}{key}.weight"])
    return tree
