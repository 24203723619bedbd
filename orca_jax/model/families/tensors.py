"""The table of a family's tensors, from the parameters of a configuration and the family's names."""

from collections.abc import Iterable, Iterator, Sequence

from orca_jax.model.families.base import JoinedPart, Weight
from orca_jax.model.families.names import TensorName, TensorNames
from orca_jax.model.families.parameters import ModelParameter, ParameterKind, parameters
from orca_jax.values.config import ModelConfig

_SUFFIXES: dict[ParameterKind, tuple[str, str]] = {
    "table": (".weight", ".table"),
    "norm": (".weight", ".scale"),
    "linear": (".weight", ".kernel"),
    "matrix": (".weight", ""),
    "conv": (".weight", ""),
    "vector": ("", ""),
    "scalar": ("", ""),
}
"""Of tensors and of paths."""
_TRANSPOSED = ("linear", "matrix", "conv")  # these are [out, in] in files
_OF_EXPERTS = "[{expert}]"


def weights(config: ModelConfig, names: TensorNames) -> tuple[Weight, ...]:
    """The tensors of all parameters of a model."""
    found = tuple(parameters(config))
    tensors = _TensorTable(config, names, found)
    rows: list[Weight] = []
    for parameter in found:
        rows += tensors.rows(parameter)
    return tuple(rows)


class _TensorTable:
    """The tensors of a model, each with the columns of the parameters that share it."""

    def __init__(
        self, config: ModelConfig, names: TensorNames, found: Iterable[ModelParameter]
    ) -> None:
        self._config = config
        self._names = names
        self._columns: dict[tuple[str, str], dict[str, int]] = {}
        for parameter in found:
            for key in self._name(parameter).keys:
                held = self._columns.setdefault((key, parameter.place), {})
                held[parameter.path] = parameter.columns

    def rows(self, parameter: ModelParameter) -> Iterator[Weight]:
        """The rows of a parameter, and of its bias."""
        theirs, ours = _SUFFIXES[parameter.kind]
        yield self._row(parameter, self._name(parameter).keys, theirs, ours)
        if parameter.has_bias:
            bias = parameter._replace(kind="vector")
            yield self._row(bias, self._name(parameter).keys, ".bias", ".bias")

    def _name(self, parameter: ModelParameter) -> TensorName:
        return self._names[parameter.name]

    def _row(
        self, parameter: ModelParameter, keys: Sequence[str], theirs: str, ours: str
    ) -> Weight:
        """The row of the first key. One of the other keys that has all experts is that of other files."""
        key, *others = keys
        name = self._name(parameter)
        instead: Weight | None = None
        if others and _OF_EXPERTS in others[0]:
            instead = self._row(parameter, others, theirs, ours)
            others = []
        return Weight(
            self._whole(parameter, key, theirs),
            parameter.path + ours,
            transpose=parameter.kind in _TRANSPOSED and not name.in_out,
            part=self._part(parameter, key),
            prefixed=not parameter.name.startswith("head"),
            first_row=name.skips,
            others=tuple(self._whole(parameter, other, theirs) for other in others),
            is_row=name.row,
            is_scalar=parameter.kind == "scalar",
            is_conv=parameter.kind == "conv",
            instead=instead,
        )

    def _whole(self, parameter: ModelParameter, key: str, suffix: str) -> str:
        """The name of a tensor in files, below a prefix."""
        if _OF_EXPERTS not in key:
            key += suffix
        if not parameter.path.startswith("blocks."):
            return key
        return f"{self._names['blocks'].keys[0]}.{key}"

    def _part(self, parameter: ModelParameter, key: str) -> JoinedPart | None:
        """The columns of a parameter in a tensor that others share, or whose columns have another order."""
        name = self._name(parameter)
        held = self._columns[key, parameter.place]
        is_shared = len(held) > 1 and parameter.columns > 0
        pairs = (0, 0)
        groups = 1
        if name.pairs:
            pairs = parameter.rotated
            groups = parameter.heads
        elif name.by:
            groups = self._groups(name.by, parameter)
        if not is_shared and pairs[0] == pairs[1]:
            return None
        sizes = tuple(columns // groups for columns in held.values())
        return JoinedPart(list(held).index(parameter.path), sizes, groups, pairs)

    def _groups(self, by: str, parameter: ModelParameter) -> int:
        """The number of groups of columns that take turns."""
        config = self._config
        match by:
            case "heads":
                return config.num_heads
            case "kv_heads":
                return config.num_kv_heads // config.kv_copies
            case "key_heads":
                assert config.delta_rule is not None, "the mixer has key heads"
                return config.delta_rule.num_key_heads
        return parameter.columns
