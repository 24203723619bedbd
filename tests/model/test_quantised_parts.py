"""Quantised weights in the parts of many families: results are those of the plain weights that the stored ones mean."""

import re
from itertools import cycle
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from orca_jax.assembly.support import quantised
from orca_jax.kernels.matmul import Quantised
from orca_jax.model.describe import read_model_config
from orca_jax.model.load import load_decoder
from orca_jax.model.matrices.quantise import expand
from orca_jax.model.parameters import flat_parameters, path_of
from orca_jax.model.transformer import Decoder
from orca_jax.values.config import EngineConfig, Quantization
from tests.model.recorded.record import load
from tests.model.recorded.test_recorded import logprobs
from tests.model.reference import mesh_of
from tests.model.states.hybrids import write
from tests.model.states.server import Server
from tests.model.states.test_hybrids import LAUNCHES, served

pytestmark = pytest.mark.usefixtures("quick_compiles")
CLOSE = 1e-4
FAMILIES = ("gpt_oss", "gemma4_text", "aria_text", "llama4_text", "nemotron")
HYBRIDS = ("youtu-0", "qwen3_next-1", "lfm2_moe-2", "bamba-1", "nemotron_h-0")
KINDS: tuple[Quantization, ...] = ("int8", "int4")
CASES = list(zip(FAMILIES, cycle(KINDS), strict=False))
STAYS_PLAIN = re.compile(
    r"(router|shared\.weight|short_conv\.kernel|attention\.up|choice_bias|taps|scale|sinks)$|bias"
)


def pair(folder: Path, kind: Quantization) -> tuple[Decoder, Decoder]:
    """A quantised decoder, and one whose plain weights are the numbers that the other ones stand for."""
    config = quantised(EngineConfig(quantization=kind), read_model_config(folder))
    small = load_decoder(folder, dtype="float32", mesh=mesh_of(1), config=config)
    plain = load_decoder(folder, dtype="float32", mesh=mesh_of(1))
    for decoder in (small, plain):
        decoder.unstack()
    held = flat_parameters(nnx.state(small))
    state, changed = nnx.to_flat_state(nnx.state(plain)), 0
    meant = []
    for keys, variable in state:
        path = path_of(keys)
        if path not in held:
            stored = Quantised(held[f"{path}.values"], held[f"{path}.scale"])
            meant.append(
                (keys, variable.replace(numbers(stored, kind, is_table=path.endswith(".table"))))
            )
            changed += 1
        else:
            assert variable.get_value().ndim < 2 or STAYS_PLAIN.search(path), (
                f"{path} is not quantised"
            )
    assert changed > 2 * plain.num_layers
    nnx.update(plain, nnx.from_flat_state(meant))
    return small, plain


def numbers(stored: Quantised, kind: Quantization, *, is_table: bool) -> jax.Array:
    """The plain matrix, or those of all experts."""
    if is_table:
        return stored.values.astype(jnp.float32) * stored.scale[:, None]
    return expand(stored, kind, jnp.dtype("float32"))


def check(found: Any, expected: Any) -> None:
    scale = max(1.0, float(np.abs(expected).max()))
    np.testing.assert_allclose(found, expected, rtol=0, atol=CLOSE * scale)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "kind"), CASES)
def test_families(family: str, kind: Quantization, tmp_path: Path) -> None:
    model = load(family)[0]
    model.write(tmp_path)
    small, plain = pair(tmp_path, kind)
    found = logprobs(small, model.ids)
    check(found, logprobs(plain, model.ids))
    assert 1e-3 < np.abs(found[[0]] - model.logprobs[0]).max() < 10, (
        "weights are rounded, and little"
    )


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), list(zip(HYBRIDS, cycle(KINDS), strict=False)))
def test_models_with_states_and_latents(name: str, kind: Quantization, tmp_path: Path) -> None:
    write(name, tmp_path)
    small, plain = (
        served(name, Server([decoder], mesh_of(1)), LAUNCHES[:3])
        for decoder in pair(tmp_path, kind)
    )
    for ours, theirs in zip(small, plain, strict=True):
        check(ours, theirs)
