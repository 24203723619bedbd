"""Zamba2: Mamba-2, and before some layers attention and an MLP, whose weights several layers share.

A layer of ours has one mixer. So a hybrid layer of the files is two here: attention and the MLP, and then Mamba-2.
Each layer with a shared block holds the block's matrices with its own additions in them. A step reads as many bytes as
with one copy; the memory of 7B is that of 11 billion numbers.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from orca_jax.model.families.base import TensorSum
from orca_jax.model.families.family import Family
from orca_jax.model.families.names import BAMBA
from orca_jax.model.families.shape import LlamaShape
from orca_jax.model.families.values import (
    HfConfig,
    get_bool,
    get_conv_width,
    get_float,
    get_int,
    refusal,
)
from orca_jax.values.config import ModelConfig
from orca_jax.values.layer_config import LayerKind, MambaConfig, SharedBlocks

_HYBRID = "hybrid"
_MAMBA = "linear_attention"
_KINDS = {_HYBRID: _HYBRID, _MAMBA: _MAMBA, "mamba": _MAMBA}  # by the names in files
_USUAL_LAYERS = 54
_USUAL_HYBRIDS = (6, 12, 18, 24, 30, 36, 42, 47, 51)
_BLOCK = "shared_transformer"
_LONG_CONTEXT = 16_384
_MOST = 100  # layers with shared blocks: the places of their tensors grow with the square


class _Zamba2Shape(NamedTuple):
    """The shape of Zamba2, with a layer more for each hybrid one."""

    sizes: LlamaShape = LlamaShape(norm_key=None, activation="gelu")

    def read(self, hf: HfConfig, family: str) -> ModelConfig:
        """Read the shape; raises as `FamilyShape.read`."""
        kinds = _layer_kinds(hf)
        embed = get_int(hf, "hidden_size", 2560)
        heads = get_int(hf, "num_attention_heads", 32)
        if 2 * embed % heads:
            raise refusal("num_attention_heads", f"must divide {2 * embed}", heads)
        head_dim = 2 * embed // heads
        config = self.sizes.read(
            hf,
            family,
            head_dim=head_dim,
            intermediate_size=4 * embed,
            num_hidden_layers=len(kinds),
        )
        if get_bool(hf, "use_long_context", False):
            config = replace(config, max_positions=_LONG_CONTEXT)
        rope = config.rope
        if not get_bool(hf, "use_mem_rope", False):
            rope = None
        layers: list[LayerKind] = []
        for kind in kinds:
            if kind == _HYBRID:
                layers.append(LayerKind(rope=rope))
            layers.append(LayerKind(mixer="mamba", mlp="no_mlp"))
        return replace(
            config,
            layers=tuple(layers),
            head_dim=head_dim,
            attention_scale=(head_dim / 2) ** -0.5,
            residual="carried",
            mamba=_mamba(hf, embed),
            shared_blocks=SharedBlocks(
                get_int(hf, "num_mem_blocks", 1),
                get_bool(hf, "use_shared_attention_adapter", False),
            ),
        )


def _mamba(hf: HfConfig, embed: int) -> MambaConfig:
    heads = get_int(hf, "n_mamba_heads", 8)
    groups = get_int(hf, "mamba_ngroups", 1)
    inner = get_int(hf, "mamba_expand", 2) * embed
    if heads % groups or inner % heads:
        problem = f"must divide {inner} and be a multiple of mamba_ngroups {groups}"
        raise refusal("n_mamba_heads", problem, heads)
    return MambaConfig(
        num_heads=heads,
        head_dim=inner // heads,
        num_groups=groups,
        state_dim=get_int(hf, "mamba_d_state", 64),
        width=get_conv_width(hf, "mamba_d_conv", 4),
        step_limits=(get_float(hf, "time_step_min", 0.001), math.inf),
    )


def _layer_kinds(hf: HfConfig) -> Sequence[str]:
    """The kind of each layer of the files."""
    kinds = hf.get("layers_block_type")
    if kinds is None:
        kinds = [_MAMBA] * _USUAL_LAYERS
        for layer in _USUAL_HYBRIDS:
            kinds[layer] = _HYBRID
    if not isinstance(kinds, list) or not all(str(kind) in _KINDS for kind in kinds):
        raise refusal("layers_block_type", f"must be a list of {', '.join(_KINDS)}", kinds)
    if not 1 <= kinds.count(_HYBRID) <= _MOST:
        raise refusal("layers_block_type", f"must have {_HYBRID} from 1 to {_MOST} times", kinds)
    if hf.get("num_hidden_layers") not in (None, len(kinds)):
        problem = f"must be {len(kinds)}, the number of kinds"
        raise refusal("num_hidden_layers", problem, hf["num_hidden_layers"])
    return [_KINDS[kind] for kind in kinds]


def _layer_names(config: ModelConfig) -> Sequence[str]:
    """The part of each of our layers in the names of tensors."""
    found: list[str] = []
    number = 0
    for layer, kind in enumerate(config.layers):
        if kind.mixer == "attention":
            found.append(f"{number}.{_BLOCK}")
            continue
        is_second = layer > 0 and config.layers[layer - 1].mixer == "attention"
        found.append(f"{number}.mamba_decoder" if is_second else str(number))
        number += 1
    return found


def _sums(config: ModelConfig) -> Mapping[str, Sequence[TensorSum]]:
    """The tensors of shared blocks: those of one of the block's layers, some with additions."""
    blocks = config.shared_blocks
    assert blocks is not None, "the shape has read it"
    names = _layer_names(config)
    users = [f"layers.{names[layer]}" for layer in config.layers_with("attention")]
    found: dict[str, Sequence[TensorSum]] = {}
    for number, user in enumerate(users):
        own = TensorSum(f"{user.removesuffix(_BLOCK)}linear.weight")
        found[f"{user}.linear.weight"] = [own]
        # transformers ties the layers of a block, and writes the first one alone, if embeddings are tied too
        holders = [user, *users[number % blocks.num_blocks :: blocks.num_blocks]]
        for key, addition in _shared_tensors(blocks):
            of_user = [_place(holder, key, addition, number) for holder in holders]
            found[f"{user}.{key}.weight"] = of_user
    return found


def _place(holder: str, key: str, addition: str, number: int) -> TensorSum:
    """A tensor of the layer `number` of those with shared blocks, as the layer `holder` may have it."""
    base = f"{holder}.{key}.weight"
    if not addition:
        return TensorSum(base)
    factors = f"{holder}.{addition}_adapter_list.{number}"
    return TensorSum(base, (f"{factors}.0.weight", f"{factors}.1.weight"))


def _shared_tensors(blocks: SharedBlocks) -> Iterator[tuple[str, str]]:
    """The tensors of a block, each with the list of its additions, or with an empty text."""
    yield "input_layernorm", ""
    yield "pre_ff_layernorm", ""
    yield "self_attn.o_proj", ""
    yield "feed_forward.down_proj", ""
    yield "feed_forward.gate_up_proj", "feed_forward.gate_up_proj"
    for name in "qkv":
        addition = ""
        if blocks.has_attention_additions:
            addition = f"self_attn.linear_{name}"
        yield f"self_attn.{name}_proj", addition


ZAMBA2 = Family(
    "zamba2",
    names=f"""
    {BAMBA}
    input_layernorm                     attention.in_norm
    pre_ff_layernorm                    attention_norm
    input_layernorm                     attention_norm      or
    feed_forward.gate_up_proj           mlp.{{gate,up}}
    linear                              mlp.last
    """,
    shape=_Zamba2Shape(),
    layer_names=_layer_names,
    sums=_sums,
    fixed={
        "add_bias_linear": (False, None),
        "rms_norm_eps": (1e-5,),  # as in the norms of Mamba-2, which have no key
    },
    aliases={"layer_types": "layers_block_type"},
    unread=(
        "adapter_rank attention_head_dim attention_hidden_size chunk_size head_dim hybrid_layer_ids kv_channels "
        "mamba_headdim num_logits_to_keep num_query_groups time_step_floor time_step_max use_conv_bias "
        "use_mamba_kernels use_mem_eff_path"
    ),
)
