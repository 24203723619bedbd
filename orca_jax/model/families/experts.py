"""The keys and weights shared by the families with experts."""

from collections.abc import Mapping
from dataclasses import replace

from orca_jax.model.families.base import JoinedPart, Weight
from orca_jax.model.families.values import HfConfig, get_int
from orca_jax.values.errors import ConfigError
from orca_jax.values.layer_config import ExpertsConfig

HARMLESS = frozenset({"output_router_logits", "router_aux_loss_coef", "router_jitter_noise"})
"""Keys of training: the loss that balances the experts, and noise on the inputs of the router."""

EVERY_LAYER: Mapping[str, tuple[object, ...]] = {
    "decoder_sparse_step": (1, None),
    "mlp_only_layers": ([], None),
}
"""Keys for models in which only some layers have experts, with the values for experts in all layers."""


def read_experts(
    hf: HfConfig,
    count_key: str,
    defaults: tuple[int, int],
    *,
    is_normalised: bool,
    shared_dim: int = 0,
) -> ExpertsConfig:
    """Read the number of experts, and of those of each token.

    Args:
        hf: the configuration.
        count_key: the key of the number of experts.
        defaults: the default of either number.
        is_normalised: see `ExpertsConfig`.
        shared_dim: see `ExpertsConfig`.

    Raises:
        ConfigError: a number is not a positive integer, or a token has more experts than there are.
    """
    count = get_int(hf, count_key, defaults[0])
    per_token = get_int(hf, "num_experts_per_tok", defaults[1])
    if per_token > count:
        message = f"config.json: num_experts_per_tok {per_token} is more than {count_key} {count}"
        raise ConfigError(message, param="num_experts_per_tok")
    return ExpertsConfig(count, per_token, is_normalised, shared_dim)


def expert_weights(
    key: str,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    width: int | None = None,
) -> tuple[Weight, ...]:
    """Rows for the router and the experts of a layer, each with tensors of its own.

    Args:
        key: the name of the block with both.
        names: the names of the tensors of an expert, in the order gate, up, down.
        width: that of an expert, if files may have its matrices in two tensors of a layer, as transformers names them.
    """
    expert = f"{key}.experts.{{expert}}"
    rows = [
        Weight(f"{expert}.{name}.weight", f"blocks.mlp.{ours}", transpose=True)
        for name, ours in zip(names, ("gate", "up", "down"), strict=True)
    ]
    if width is not None:
        joined = joined_experts(f"{key}.experts.gate_up_proj", f"{key}.experts.down_proj", width)
        rows = [replace(row, instead=other) for row, other in zip(rows, joined, strict=True)]
    return Weight(f"{key}.gate.weight", "blocks.mlp.router", transpose=True), *rows


def joined_experts(
    gate_up: str, down: str, width: int, *, transpose: bool = True
) -> tuple[Weight, ...]:
    """Rows for experts whose matrices are in two tensors of a layer.

    Args:
        gate_up: the name of the tensor with gates before the vectors beside them.
        down: the name of the other one.
        width: that of an expert.
        transpose: True if matrices are [out, in], as in `Weight`.
    """
    parts = (JoinedPart(index, (width, width)) for index in range(2))
    rows = [
        Weight(f"{gate_up}[{{expert}}]", f"blocks.mlp.{ours}", transpose=transpose, part=part)
        for ours, part in zip(("gate", "up"), parts, strict=True)
    ]
    return *rows, Weight(f"{down}[{{expert}}]", "blocks.mlp.down", transpose=transpose)
