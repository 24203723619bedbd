"""Reading of rotary positions: `rope_parameters` of transformers 5, and the older `rope_scaling` and `rope_theta`.

The rules are those of transformers 5 (`convert_rope_params_to_dict`, `standardize_rope_params`).
"""

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

from orca_jax.model.families.base import words
from orca_jax.model.families.fields import FieldKey, flag, number, number_or_none
from orca_jax.model.families.values import (
    HfConfig,
    get_cap,
    get_float,
    get_floats,
    get_int,
    is_same,
    refusal,
)
from orca_jax.values.checks import short
from orca_jax.values.config import ModelConfig
from orca_jax.values.errors import ConfigError
from orca_jax.values.layer_config import RopeConfig

Scaling = Mapping[str, Any]

KEYS = frozenset(
    {"rope_parameters", "rope_scaling", "rope_theta", "original_max_position_embeddings"}
)
"""Keys of config.json with rotary positions."""

INNER_KEYS = words(
    "rope_type type rope_theta factor original_max_position_embeddings attention_factor beta_fast beta_slow mscale "
    "mscale_all_dim truncate short_factor long_factor low_freq_factor high_freq_factor partial_rotary_factor finetuned"
)
"""Keys of the object. `type` is the old name of `rope_type`; `finetuned` is a note of the first models with yarn.

Transformers too reads only those of the kind, and ignores the others.
"""

SECTIONS = frozenset({"mrope_section", "mrope_interleaved"})
"""Keys of rotary positions in three parts, of which texts need one."""

logger = logging.getLogger(__name__)


class RopeRules(NamedTuple):
    """The differences between families."""

    theta_key: str | None = "rope_theta"  # outside the object; None: no key
    theta: float = 10000.0  # if no key names it
    # the type of layers with these positions, if `rope_parameters` has an object for each type
    part: str | None = None
    share_key: str = "partial_rotary_factor"  # outside the object
    # rotated share of each head if no key names it; None: the whole head, always
    share: float | None = None
    # default of `original_max_position_embeddings`; None: `max_position_embeddings`
    original: int | None = None
    renamed: Mapping[str, str] = {}  # other names of kinds
    kinds: tuple[str, ...] | None = None  # the supported ones; None: all but proportional
    default: Mapping[str, Any] = {}  # the object in files without one
    notes: frozenset[str] = frozenset()  # keys of the object without effect
    # keys beside the objects of types of layers, without effect
    notes_beside: frozenset[str] = frozenset()
    temperature_key: str | None = None  # of `RopeConfig.temperature`, in the object


WHOLE_HEADS = RopeRules()
_PARTS = ("full_attention", "sliding_attention")  # types of layers


def read_rope(
    hf: HfConfig, head_dim: int, limit: int, rules: RopeRules = WHOLE_HEADS
) -> tuple[RopeConfig, int]:
    """The rotary positions, and their number.

    Args:
        hf: the configuration.
        head_dim: dimensions of a head.
        limit: `max_position_embeddings`.
        rules: the rules of the family.

    Raises:
        ConfigError: a key is unknown, or a value is invalid or not supported. The error names the key.
    """
    if rules.part is None:
        key, scaling = _chosen(hf, rules.default)
    else:
        key, scaling = _part(hf, rules.part, rules.default, rules.notes_beside)
    unknown = sorted(
        name
        for name in scaling.keys() - INNER_KEYS - rules.notes - {rules.temperature_key}
        if scaling[name] is not None
    )
    if unknown:
        message = f"config.json: {key} has the unknown key {short(unknown[0])}; remove it if the model does not need it"
        raise ConfigError(message, param=unknown[0])
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    kinds = rules.kinds or tuple(sorted(_KINDS.keys() - {"proportional"}))
    if isinstance(kind, str):
        kind = rules.renamed.get(kind, kind)
    if kind not in kinds:
        raise refusal("rope_type", f"must be one of {', '.join(kinds)}", kind)
    for name in _NEEDED.get(kind, ()):
        if scaling.get(name) is None:
            raise ConfigError(f"config.json: rope_type {kind} needs {name} in {key}", param=name)
    rotated = _rotated_dim(hf, scaling, head_dim, rules, is_partial=kind == "proportional")
    # Some models write the length beside the object, and transformers prefers this one.
    is_outer = rules.original is not None or hf.get("original_max_position_embeddings") is not None
    original = get_int(
        hf if is_outer else scaling, "original_max_position_embeddings", rules.original or limit
    )
    theta = get_float(scaling, "rope_theta", _outer_theta(hf, rules))
    rope = _of_kind(kind, scaling, theta, original, limit)
    if rules.temperature_key is not None:
        temperature = get_float(scaling, rules.temperature_key)
        rope = dataclasses.replace(rope, temperature=temperature, original_max_position=original)
    if rotated != head_dim:
        rope = dataclasses.replace(rope, rotated_dim=rotated)
    if kind == "longrope":
        _check_factors(scaling, rotated)
        # Beyond `original` all frequencies would change, and with them all cached keys.
        limit = min(limit, original)
    return rope, limit


def _chosen(hf: HfConfig, default: Scaling) -> tuple[str, Scaling]:
    """The object with the kind, and its key: `rope_scaling` if there are both, as in transformers."""
    both = ((key, _object(hf, key)) for key in ("rope_scaling", "rope_parameters"))
    found = {key: value for key, value in both if value}
    if len(found) == 2 and found["rope_scaling"] != found["rope_parameters"]:
        logger.warning(
            "config.json: rope_scaling replaces rope_parameters, as in transformers; remove one of them"
        )
    return next(iter(found.items()), ("rope_parameters", default))


def _outer_theta(hf: HfConfig, rules: RopeRules) -> float:
    """The base beside the object of the scaling, or the family's."""
    if rules.theta_key is None:
        return rules.theta
    return get_float(hf, rules.theta_key, rules.theta)


def _part(hf: HfConfig, part: str, default: Scaling, notes: frozenset[str]) -> tuple[str, Scaling]:
    """The object for a type of layers, and its key. `rope_scaling` changes layers without a window, as in transformers.

    Gemma 3 and LFM3 have them. `notes` may be beside the objects.
    """
    parts = _object(hf, "rope_parameters")
    scaling = _object(hf, "rope_scaling")
    unknown = sorted(parts.keys() - _PARTS - notes)
    if unknown:
        raise refusal("rope_parameters", f"may have only {' and '.join(_PARTS)}", unknown)
    own = default
    if parts:
        own = _object(parts, part, "rope_parameters")
    if part == _PARTS[0] and scaling:
        return "rope_scaling", {**own, **scaling}
    return "rope_parameters", own


def no_scaling(hf: HfConfig, config: ModelConfig) -> Mapping[str, Any]:
    """No fields; `rope_scaling` is refused, in families of which transformers reads `rope_parameters` alone."""
    if hf.get("rope_scaling") is not None:
        problem = "has no effect in transformers: use rope_parameters"
        raise refusal("rope_scaling", problem, hf["rope_scaling"])
    return {}


def _object(values: Scaling, key: str, name: str | None = None) -> Scaling:
    """The object of a key, empty for null; errors show `name` if it is given."""
    value = values.get(key)
    if value is not None and not isinstance(value, dict):
        raise refusal(name or key, "must be an object or null", value)
    return value or {}


def _rotated_dim(
    hf: HfConfig, scaling: Scaling, head_dim: int, rules: RopeRules, *, is_partial: bool
) -> int:
    """The number of rotated dimensions of each head; the object counts more than a key outside it.

    With `is_partial`, the share in the object counts frequencies: whole heads are rotated, some dimensions by nothing.
    """
    if rules.share is None:
        for values, key in ((hf, rules.share_key), (scaling, "partial_rotary_factor")):
            share = values.get(key)
            if (
                share is not None
                and not is_same(share, 1.0)
                and not (is_partial and values is scaling)
            ):
                raise refusal(key, "is not supported; it must be 1.0", share)
        if head_dim % 2:
            raise refusal("head_dim", "must be even for rotary positions", head_dim)
        return head_dim
    share = get_float(scaling, "partial_rotary_factor", get_float(hf, rules.share_key, rules.share))
    rotated = int(head_dim * share)
    if share > 1 or rotated < 2 or rotated % 2:
        whole = f"the {head_dim} dimensions of a head"
        problem = f"must be a share of {whole} with an even number of them"
        raise refusal(rules.share_key, problem, share)
    return rotated


def _check_factors(scaling: Scaling, head_dim: int) -> None:
    for key in ("short_factor", "long_factor"):
        factors = get_floats(scaling, key)
        if len(factors) != head_dim // 2:
            problem = f"must have {head_dim // 2} values for rope_type longrope"
            raise refusal(key, problem, f"{len(factors)} values")


def _of_kind(kind: Any, scaling: Scaling, theta: float, original: int, limit: int) -> RopeConfig:
    """The positions of a kind. Without a factor, that of some kinds is `limit` divided by `original`."""
    if kind in _BY_LENGTH and scaling.get("factor") is None:
        scaling = {**scaling, "factor": limit / original}
    fields = {name: key.value(scaling) for name, key in _KINDS[kind].items()}
    if kind in (*_BY_LENGTH, "llama3"):
        fields["original_max_position"] = original
    rope = RopeConfig(theta=theta, kind=kind, **fields)
    if rope.share > 1:
        problem = "must be at most 1 for rope_type proportional"
        raise refusal("partial_rotary_factor", problem, rope.share)
    if kind == "llama3" and rope.high_freq_factor < rope.low_freq_factor:
        problem = f"must be at least low_freq_factor {rope.low_freq_factor}"
        raise refusal("high_freq_factor", problem, rope.high_freq_factor)
    if kind == "yarn" and theta == 1.0:
        raise refusal("rope_theta", "must differ from 1 for rope_type yarn", theta)
    if kind == "longrope" and original == 1:
        problem = "must be more than 1 for rope_type longrope"
        raise refusal("original_max_position_embeddings", problem, original)
    return rope


_BY_LENGTH = ("yarn", "longrope")
_FACTOR = {"factor": FieldKey("factor", get_float, None)}
_KINDS: Mapping[str, Mapping[str, FieldKey]] = {
    "default": {},
    "linear": _FACTOR,
    # frequencies change only beyond `max_position_embeddings`, and no text is longer here
    "dynamic": _FACTOR,
    "llama3": {
        **_FACTOR,
        "low_freq_factor": FieldKey("low_freq_factor", get_float, None),
        "high_freq_factor": FieldKey("high_freq_factor", get_float, None),
    },
    "yarn": {
        **_FACTOR,
        "beta_fast": number("beta_fast", 32.0),
        "beta_slow": number("beta_slow", 1.0),
        "attention_factor": number_or_none("attention_factor"),
        "mscale": FieldKey("mscale", get_cap, None),
        "mscale_all_dim": FieldKey("mscale_all_dim", get_cap, None),
        "truncate": flag("truncate", True),
    },
    "longrope": {
        **_FACTOR,
        "attention_factor": number_or_none("attention_factor"),
        "short_factor": FieldKey("short_factor", get_floats, None),
    },
    "proportional": {"factor": number("factor"), "share": number("partial_rotary_factor")},
}
"""The fields of `RopeConfig` by kind, and their keys."""

_NEEDED: Mapping[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("low_freq_factor", "high_freq_factor", "factor"),
    "longrope": ("short_factor", "long_factor"),
}
