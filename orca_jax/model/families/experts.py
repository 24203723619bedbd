"""Readers of experts: numbers, widths, routers, and the layers without experts."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any

from orca_jax.model.families.fields import FieldKey, Fields, Reader
from orca_jax.model.families.values import (
    HfConfig,
    get_bool,
    get_count,
    get_float,
    get_int,
    refusal,
)
from orca_jax.values.config import ModelConfig
from orca_jax.values.layer_config import ExpertsConfig, RouterConfig

OF_ROUTERS = "output_router_logits router_aux_loss_coef router_jitter_noise "
"""Keys of training: the loss that balances the experts, and noise on the inputs of the router."""

EVERY_LAYER: dict[str, tuple[object, ...]] = {
    "decoder_sparse_step": (1, None),
    "mlp_only_layers": ([], None),
}
"""Keys for models in which only some layers have experts, with the values for experts in all layers."""

GROUPED_ALIASES = {"num_local_experts": "n_routed_experts", "num_experts": "n_routed_experts"}
"""Other names of the number of experts that `grouped_experts` reads."""

NEXT_TOKENS = "num_mtp_layers num_nextn_predict_layers "
"""Keys of further layers, which are skipped."""

DenseLayers = Callable[[HfConfig, ModelConfig], tuple[int, ...]]


@dataclass(frozen=True)
class Mixture:
    """A reader of experts.

    Attributes:
        key: that of the number of experts.
        defaults: experts of a layer, and of a token.
        width: default of `moe_intermediate_size`; None: an expert is as wide as `intermediate_size`.
        per_token: the key of the experts of a token.
        is_normalised: see `ExpertsConfig`.
        shared: the width of the expert of all tokens, by that of the others; None: there is none.
        router: reads its options; None: they are the usual ones.
        dense: reads the layers without experts, whose MLPs have `intermediate_size`; None: there are none.
        options: other fields of `ExpertsConfig`.
    """

    key: str
    defaults: tuple[int, int]
    width: int | None = None
    per_token: str = "num_experts_per_tok"
    is_normalised: FieldKey | bool = True
    shared: Callable[[HfConfig, int], int] | None = None
    router: Callable[[HfConfig], RouterConfig] | None = None
    dense: DenseLayers | None = None
    options: Fields = field(default_factory=dict)

    def __call__(self, hf: HfConfig, config: ModelConfig) -> Fields:
        """Read the fields.

        Raises:
            ConfigError: a number is not a positive integer, or a token has more experts than there are.
        """
        count = get_int(hf, self.key, self.defaults[0])
        per_token = get_int(hf, self.per_token, self.defaults[1])
        if per_token > count:
            raise refusal(self.per_token, f"must be at most {self.key} {count}", per_token)
        width = config.mlp_dim
        if self.width is not None:
            width = get_int(hf, "moe_intermediate_size", self.width)
        options: dict[str, Any] = {**self.options}
        if self.shared is not None:
            options["shared_dim"] = self.shared(hf, width)
        if self.router is not None:
            options["router"] = self.router(hf)
        mlps: Fields = {}
        if self.dense is not None:
            mlps = dense_layers(config, self.dense(hf, config), config.mlp_dim)
        is_normalised = self.is_normalised
        if isinstance(is_normalised, FieldKey):
            is_normalised = is_normalised.value(hf)
        return {
            **mlps,
            "mlp_dim": width,
            "experts": ExpertsConfig(count, per_token, is_normalised, **options),
        }


def dense_layers(config: ModelConfig, layers: Collection[int], width: int) -> Fields:
    """The fields of layers with an MLP of another width, or with one in place of experts."""
    if not layers:
        return {}
    mlps = [kind.mlp for kind in config.layers]
    for layer in layers:
        mlps[layer] = "dense_mlp"
    return {"mlp": tuple(mlps), "dense_mlp_dim": width}


def shared_expert(default: int) -> Callable[[HfConfig, int], int]:
    """A reader of the width of the expert of all tokens."""
    return lambda hf, width: get_int(hf, "shared_expert_intermediate_size", default)


def shared_experts(key: str, default: int) -> Callable[[HfConfig, int], int]:
    """A reader of a number of experts of all tokens, which are one."""
    return lambda hf, width: get_count(hf, key, default) * width


def first_layers(default: int, key: str = "first_k_dense_replace") -> DenseLayers:
    """A reader of the number of first layers without experts."""

    def read(hf: HfConfig, config: ModelConfig) -> tuple[int, ...]:
        number = get_count(hf, key, default)
        if number >= config.num_layers:
            raise refusal(key, f"must be less than the {config.num_layers} layers", number)
        return tuple(range(number))

    return read


def first_of_types(default: int, key: str | None = None) -> DenseLayers:
    """A reader of the first layers without experts, by `mlp_layer_types`; `key` has their number in files without."""

    def read(hf: HfConfig, config: ModelConfig) -> tuple[int, ...]:
        usual = default if key is None else get_count(hf, key, default)
        number = dense_of_types(hf, config, usual)
        if number >= config.num_layers:
            name = key or "num_hidden_layers"
            if hf.get("mlp_layer_types") is not None:
                name = "mlp_layer_types"
            problem = f"must leave a layer with experts beside the {number} without"
            raise refusal(name, problem, hf.get(name))
        return tuple(range(number))

    return read


def dense_of_types(hf: HfConfig, config: ModelConfig, default: int) -> int:
    """The number of first layers without experts, by `mlp_layer_types`.

    Raises:
        ConfigError: other layers have none.
    """
    kinds = hf.get("mlp_layer_types")
    if kinds is None:
        return default
    number = 0
    if isinstance(kinds, list):
        number = kinds.count("dense")
    if kinds != ["dense"] * number + ["sparse"] * (config.num_layers - number):
        raise refusal(
            "mlp_layer_types",
            f"must be dense for the first of {config.num_layers} layers, then sparse",
            kinds,
        )
    return number


def grouped_experts(
    defaults: tuple[int, int, int],
    dense: DenseLayers | None = None,
    *,
    is_normalised: bool = True,
    groups: tuple[int, int] = (1, 1),
    shared: int = 1,
    scale: float = 1.0,
) -> Reader:
    """A reader of experts as in DeepSeek-V3: sigmoid scores, a bias for the choice, groups, and a shared expert.

    Args:
        defaults: experts of a layer, experts of a token, and the width of one.
        dense: reads the layers without experts.
        is_normalised: default of `norm_topk_prob`.
        groups: defaults of `n_group` and `topk_group`.
        shared: default of `n_shared_experts`.
        scale: default of `routed_scaling_factor`.
    """

    def router(hf: HfConfig) -> RouterConfig:
        """The router; raises `ConfigError` if groups do not divide the experts."""
        count = get_int(hf, "n_routed_experts", defaults[0])
        per_token = get_int(hf, "num_experts_per_tok", defaults[1])
        number = get_int(hf, "n_group", groups[0])
        used = get_int(hf, "topk_group", groups[1])
        if count % number or used > number or (number > 1 and count < 2 * number):
            raise refusal(
                "n_group",
                f"must divide the {count} experts into groups of two or more, at least {used}",
                number,
            )
        most = count // number * used
        if per_token > most:
            raise refusal("num_experts_per_tok", f"must be at most {most}", per_token)
        return RouterConfig(
            "sigmoid",
            has_bias=True,
            groups=number,
            used_groups=used,
            eps=1e-20,
            scale=get_float(hf, "routed_scaling_factor", scale),
        )

    return Mixture(
        "n_routed_experts",
        defaults[:2],
        defaults[2],
        is_normalised=FieldKey("norm_topk_prob", get_bool, is_normalised),
        shared=shared_experts("n_shared_experts", shared),
        router=router,
        dense=dense,
        options={"shared_gate": False},
    )


def with_router(**changes: Any) -> Reader:
    """A reader that changes the router of experts that are read already."""

    def read(hf: HfConfig, config: ModelConfig) -> Fields:
        assert config.experts is not None, "they are read before"
        router = replace(config.experts.router, **changes)
        return {"experts": replace(config.experts, router=router)}

    return read


def no_groups(hf: HfConfig, config: ModelConfig) -> Fields:
    """No fields; groups of experts, and weights that are not normalised, are refused."""
    assert config.experts is not None, "they are read before"
    if config.experts.router.groups != 1:
        raise refusal("n_group", "must be 1", hf.get("n_group"))
    if not config.experts.is_normalised:
        raise refusal("norm_topk_prob", "must be true", False)
    return {}
