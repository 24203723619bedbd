"""The declaration of a family of checkpoints: names of its options and weights. Plain data, no arrays."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from orca_jax.model.families.values import HfConfig
from orca_jax.values.config import ModelConfig


@dataclass(frozen=True)
class JoinedPart:
    """The columns of one parameter in a tensor with several parameters, after `Weight.transpose`.

    The columns of the tensor are `groups` equal groups. Each has columns of all the parameters in their order,
    `sizes` in number; those of `index` belong to this one. Those from `pairs[0]` to `pairs[1]` of each group of the
    parameter are rotated: the tensor has pairs side by side, the parameter first ones and then second ones.
    """

    index: int
    sizes: tuple[int, ...]
    groups: int = 1
    pairs: tuple[int, int] = (0, 0)

    @property
    def num_columns(self) -> int:
        """Columns of the whole tensor."""
        return self.groups * sum(self.sizes)

    def column(self, number: Any) -> Any:
        """The tensor's column with the column `number` of the parameter; or an array of them, for an array."""
        group, offset = divmod(number, self.sizes[self.index])
        first, stop = self.pairs
        if stop > first:
            second, pair = divmod(offset - first, (stop - first) // 2)
            offset = offset + ((first <= offset) & (offset < stop)) * (
                first + 2 * pair + second - offset
            )
        return group * sum(self.sizes) + sum(self.sizes[: self.index]) + offset


@dataclass(frozen=True)
class Weight:
    """The mapping of one tensor of a checkpoint to a parameter.

    Attributes:
        key: name without the family's prefix. "{layer}" stands for the layer's number, and "{expert}" for the number of
            an expert; the tensors of all layers and experts are stacked into one parameter. With "[{expert}]" at the
            end, one tensor has the matrices of all experts of a layer.
        path: the path of the parameter in the decoder.
        transpose: True if the tensor is [out, in]; the parameter is [in, out].
        part: the columns of the parameter, if the tensor holds several ones.
        prefixed: False for a tensor outside the family's prefix.
        first_row: the first row of the parameter in the tensor; 0 in stacked ones.
        others: names of the tensor in older files.
        is_row: True for a vector that is a matrix of one row in the tensor.
        is_scalar: True for a parameter of one number, whose tensor has no axes.
        is_conv: True for the taps of a convolution: the tensor is [channels, 1, taps], the parameter [taps, channels].
        instead: the row of files that have none of the tensors of this one.
    """

    key: str
    path: str
    transpose: bool = False
    part: JoinedPart | None = None
    prefixed: bool = True
    first_row: int = 0
    others: tuple[str, ...] = ()
    is_row: bool = False
    is_scalar: bool = False
    is_conv: bool = False
    instead: "Weight | None" = None

    @property
    def stacked(self) -> bool:
        """True if there is one tensor for each layer, or one for each of its experts."""
        return "{layer}" in self.key

    @property
    def is_of_experts(self) -> bool:
        """True if there is one tensor for each expert of each layer."""
        return "{expert}" in self.key


def words(text: str) -> frozenset[str]:
    """The words of a text, which are keys of a config.json."""
    return frozenset(text.split())


def paired(rows: tuple[Weight, ...], config: ModelConfig) -> tuple[Weight, ...]:
    """The rows, with pairs side by side for the projections to queries and keys."""
    heads = {"query": config.num_heads, "key": config.num_kv_heads // config.kv_copies}
    rotated = config.head_dim
    if config.rope is not None:
        rotated = config.rope.rotated_dim or rotated
    parts = {
        f"blocks.attention.{name}": JoinedPart(0, (config.head_dim,), number, (0, rotated))
        for name, number in heads.items()
    }
    return tuple(
        replace(row, part=parts.get(row.path.rpartition(".")[0], row.part)) for row in rows
    )


def linear(key: str, path: str, *, bias: bool) -> tuple[Weight, ...]:
    """Rows for a linear layer with a matrix stored as [out, in]."""
    kernel = Weight(f"{key}.weight", f"{path}.kernel", transpose=True)
    if bias:
        return (kernel, Weight(f"{key}.bias", f"{path}.bias"))
    return (kernel,)


def linears(
    names: Mapping[str, str], key: str, path: str, *, bias: bool = False
) -> tuple[Weight, ...]:
    """Rows for linear layers below `key` and `path`. `names` has ours by theirs."""
    rows: list[Weight] = []
    for theirs, ours in names.items():
        rows += linear(f"{key}.{theirs}", f"{path}.{ours}", bias=bias)
    return tuple(rows)


def norm(key: str, path: str) -> tuple[Weight, Weight]:
    """Rows for a LayerNorm."""
    return Weight(f"{key}.weight", f"{path}.scale"), Weight(f"{key}.bias", f"{path}.bias")


def norms(names: Mapping[str, str]) -> tuple[Weight, ...]:
    """Rows for LayerNorms: our paths by their keys."""
    rows: list[Weight] = []
    for key, path in names.items():
        rows += norm(key, path)
    return tuple(rows)


def rows_if(exists: object, *rows: Weight) -> tuple[Weight, ...]:
    """The rows of a part; none unless it `exists`."""
    if exists:
        return rows
    return ()


def with_change(rows: Iterable[Weight], path: str, **fields: Any) -> tuple[Weight, ...]:
    """The rows, with other values of some fields for the parameter `path`."""
    return tuple(replace(row, **fields) if row.path == path else row for row in rows)


def head(
    config: ModelConfig, key: str = "lm_head.weight", others: tuple[str, ...] = ()
) -> tuple[Weight, ...]:
    """The row of the unembedding; none if it is the embedding. `others` are as in `Weight`."""
    if config.tied_embeddings:
        return ()
    return (Weight(key, "head.table", prefixed=False, others=others),)


@dataclass(frozen=True)
class Family:
    """One `model_type`.

    Args:
        name: the `model_type`.
        models: published models of this family.
        config_from_hf: reads a configuration with checked keys (`keys.check_keys`).
        keys: the keys read by `config_from_hf`, beside those shared by all families.
        architectures: classes of transformers with these weights; the first is the usual one.
        weights: the tensors of a checkpoint.
        prefixes: prefixes of tensors in published files.
        ignored: matches tensors without weights.
        has_further_layers: files may have layers behind the last one, which are skipped.
        fixed: keys with one supported value, and its spellings; see `keys.FIXED`.
        aliases: other names of keys.
        harmless: keys without effect on the logits of this family, beside those of `keys.HARMLESS`.
    """

    name: str
    models: str
    config_from_hf: Callable[[HfConfig], ModelConfig]
    keys: frozenset[str]
    architectures: tuple[str, ...]
    weights: Callable[[ModelConfig], tuple[Weight, ...]]
    prefixes: tuple[str, ...]
    ignored: re.Pattern[str]
    has_further_layers: bool = False
    fixed: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    harmless: frozenset[str] = frozenset()
