"""Costs from measured times of one layer, by operator: `--cost profile:PREFIX,layers=N`.

The files are PREFIX followed by `_dense.csv`, `_per_sequence.csv`, `_attention.csv` and, with experts, `_moe.csv`, or
`.csv.gz`. Their form is that of LLMServingSim (`profiler/perf`):

    layer,tokens,time_us                                     operators by tokens of the batch
    layer,sequences,time_us                                  operators by sequences with a drawn token
    prefill_chunk,kv_prefill,n_decode,kv_decode,time_us      attention
    tokens,activated_experts,time_us                         the experts of a layer
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from orca_jax.sim.cost import WorkCounts
from orca_jax.tools.plan.measured import Curve, Grid, read_rows, read_values, table_file
from orca_jax.values.errors import ConfigError

PROFILE = "profile:"
_ONCE = ("embedding", "final_layernorm")  # all others are in each layer
_TWICE = "layernorm"  # before attention and before the MLP
_ATTENTION = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
_USAGE = (
    "profile:PREFIX,layers=N, with host=, experts=, active=, replicas=, devices=, width=, bandwidth= and hop= as "
    "needed"
)


@dataclass(frozen=True)
class ProfileSettings:
    """What the tables do not say.

    Attributes:
        layers: of the model.
        host: seconds of the host for each iteration.
        experts: of a layer; 0 without.
        active: experts of a token.
        replicas: engines with equal loads that share the experts, each with its part of them.
        devices: that sum their results twice in a layer (tensor parallel).
        width: numbers of a token that they sum, of 2 bytes.
        bandwidth: bytes per second of such a sum.
        hop: seconds of such a sum beside its bytes.
    """

    layers: int = 0
    host: float = 0.0
    experts: int = 0
    active: int = 0
    replicas: int = 1
    devices: int = 1
    width: int = 0
    bandwidth: float = 0.0
    hop: float = 0.0


@dataclass
class ProfileCost:
    """The sum of the measured operators of an iteration.

    Chunks of several prompts count as one with as many pairs. More increments beside a chunk than a table has count as
    those with as many tokens of context in all.
    """

    settings: ProfileSettings
    dense: Mapping[str, Curve]
    per_sequence: Mapping[str, Curve]
    attention: Grid
    most_beside: int
    experts: Grid | None = None
    buckets: tuple[int, ...] = field(default=(), init=False)

    @property
    def host(self) -> float:
        """Seconds of the host for each iteration."""
        return self.settings.host

    @property
    def num_outside(self) -> int:
        """The number of looked up values outside of a table."""
        of_experts = 0 if self.experts is None else self.experts.num_outside
        return self.attention.num_outside + of_experts

    def stages(self, work: WorkCounts, num_stages: int) -> Sequence[float]:
        """An equal part of the iteration's seconds on each stage."""
        num_tokens = work.num_tokens
        once = sum([self.dense[name].at(num_tokens) for name in _ONCE if name in self.dense])
        of_layer = self._attention(work) + self._experts(num_tokens) + self._sums(num_tokens)
        for name, curve in self.dense.items():
            if name not in _ONCE:
                of_layer += curve.at(num_tokens) * (2 if name == _TWICE else 1)
        drawn = sum([curve.at(max(1, work.draws)) for curve in self.per_sequence.values()])
        seconds = self.settings.layers * of_layer + once + drawn
        return [seconds / num_stages] * num_stages

    def _attention(self, work: WorkCounts) -> float:
        chunk = work.chunk_tokens
        before = 0.0
        if chunk:
            before = max(0.0, (work.chunk_pairs - chunk * (chunk + 1) / 2) / chunk)
        increments = work.increments
        if chunk:
            increments = min(increments, self.most_beside)
        context = 0.0
        if increments:
            context = work.context / increments
        return self.attention.at((chunk, before, increments, context))

    def _experts(self, num_tokens: int) -> float:
        """The experts of a device that independent choices of all tokens are expected to name."""
        if self.experts is None:
            return 0.0
        own = self.settings
        of_all = num_tokens * own.replicas
        unused = (1 - own.active / own.experts) ** of_all
        return self.experts.at((of_all, own.experts / own.replicas * (1 - unused)))

    def _sums(self, num_tokens: int) -> float:
        """Two sums over devices."""
        own = self.settings
        if own.devices == 1:
            return 0.0
        num_bytes = 2 * num_tokens * own.width
        return 2 * (own.hop + num_bytes * 2 * (own.devices - 1) / own.devices / own.bandwidth)


def read_profile(text: str) -> ProfileCost:
    """The cost of a flag, such as "profile:DIR/llama_8b,layers=32".

    Raises:
        ConfigError: the flag or a file is wrong; `param` is "cost".
    """
    prefix, *parts = text.removeprefix(PROFILE).split(",")
    settings = _settings(parts)
    curves = []
    for end, column in (("dense", "tokens"), ("per_sequence", "sequences")):
        found: dict[str, dict[int, float]] = {}
        for row in read_rows(table_file(f"{prefix}_{end}"), [column], ["layer"]):
            found.setdefault(row.name, {})[row.key[0]] = row.seconds
        curves.append({name: Curve(points) for name, points in found.items()})
    of_attention = {
        row.key: row.seconds for row in read_rows(table_file(f"{prefix}_attention"), _ATTENTION)
    }
    most_beside = max([key[2] for key in of_attention if key[0]], default=0)
    experts = None
    if settings.experts:
        columns = ("tokens", "activated_experts")
        rows = read_rows(table_file(f"{prefix}_moe"), columns)
        experts = Grid({row.key: row.seconds for row in rows})
    return ProfileCost(settings, curves[0], curves[1], Grid(of_attention), most_beside, experts)


def _settings(parts: Sequence[str]) -> ProfileSettings:
    kinds = {name: type(value) for name, value in vars(ProfileSettings()).items()}
    settings = ProfileSettings(**read_values(parts, kinds, _USAGE))
    if min(settings.layers, settings.devices, settings.replicas) < 1:
        raise ConfigError("layers, devices and replicas must be at least 1", param="cost")
    if settings.active > settings.experts or bool(settings.active) != bool(settings.experts):
        raise ConfigError("active must be from 1 to experts", param="cost")
    if settings.devices > 1 and not (settings.width and settings.bandwidth):
        raise ConfigError("devices needs width and bandwidth of their sums", param="cost")
    return settings
