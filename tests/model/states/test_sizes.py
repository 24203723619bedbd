"""The bytes in the cache of latents and of states, by formula, in `plan` and as allocated; and the work of a step."""

from pathlib import Path

import jax
import pytest

from orca_jax.exec.programs import Programs
from orca_jax.exec.states import layer_bytes
from orca_jax.model.load import prepare_load, tensor_mesh
from orca_jax.model.stages import spans
from orca_jax.tools.plan.accelerators import ACCELERATORS
from orca_jax.tools.plan.memory import Demand, Split, fit
from orca_jax.values.cache_spec import form_groups
from orca_jax.values.config import CacheConfig, ExecutorConfig
from tests.aot.models import MODELS
from tests.covering import slow
from tests.exec.test_groups import PAGE_SIZE, ROWS
from tests.model.states.hybrids import write
from tests.model.states.test_launches import NUM_STATES, executor_of

pytestmark = pytest.mark.usefixtures("optimised")  # memory is that of programs of users

LATENT = 27 * (512 + 64) * 2
"""Bytes of a token of DeepSeek-V2-Lite: in each layer a latent and a rotated key in bfloat16, for all heads."""
ATTENDED = 8 * 2 * 4 * 256 * 2
"""Bytes of a token of Qwen3.5 9B: keys and values of four heads in every fourth layer."""
STATE = 24 * (3 * (2 * 16 * 128 + 32 * 128) * 2 + 32 * 128 * 128 * 4)
"""Bytes of a request of Qwen3.5 9B: in the others three inputs of convolutions, and a float32 matrix of each head."""


@pytest.mark.parametrize(
    ("name", "of_token", "of_state"),
    [("DeepSeek-V2-Lite", LATENT, 0), ("Qwen3.5 9B", ATTENDED, STATE)],
)
def test_plan_counts_what_the_formula_says(name: str, of_token: int, of_state: int) -> None:
    model = MODELS[name]
    found = fit(model, Split(1, 1), ACCELERATORS["h200"], Demand("bfloat16", "bfloat16", 0.9))
    (group,) = found.cache.groups
    assert group.pages_per_block == len(group.layers)
    tokens = found.cache.num_blocks[0] * found.cache.page_size
    assert found.stages[0].cache == tokens * of_token + found.cache.num_states * of_state
    assert sum(layer_bytes(model, "bfloat16")) == of_state and (found.cache.num_states > 0) == (
        of_state > 0
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["youtu-0", "qwen3_5_text-0", "bamba-0"])
@pytest.mark.usefixtures("compiled_once", "few_programs")
def test_devices_hold_what_the_formula_says(name: str, program_cache: str, tmp_path: Path) -> None:
    executor = executor_of(name, "switched", 1, 1, program_cache, tmp_path)
    pages, states = (
        sum(array.nbytes for array in jax.tree.leaves(part))
        for part in executor.stages[0].state.caches
    )
    model, cache = executor._model, executor.config.cache
    each = sum(layer.shape.token_size for layer in model.layer_caches if layer is not None)
    assert pages == cache.num_slots * each * 4
    assert states == NUM_STATES * sum(layer_bytes(model, "float32")) * model.has_states


@pytest.mark.parametrize("name", ["bamba-0", slow("qwen3_5_text-1")])
def test_the_work_of_layers_with_states_does_not_grow_with_the_context(
    name: str, tmp_path: Path
) -> None:
    """Of a stage that has no attention; with attention it grows."""
    write(name, tmp_path)
    loading, mesh = prepare_load(tmp_path, dtype="float32"), tensor_mesh(jax.devices()[:1])
    found = {}
    for span in spans(loading.config, loading.config.num_layers):
        decoder = loading.shapes(mesh, span)
        decoder.unstack()
        for length in (64, 1024):
            groups = form_groups(loading.config.layer_caches, length)
            cache = CacheConfig(groups, (64,), PAGE_SIZE, "float32", num_states=8)
            config = ExecutorConfig("float32", 1, (4,), ROWS, length, cache, "reference")
            lowered = Programs(decoder, config, mesh).lowerings()["layers", 4]()
            found.setdefault(decoder.of_stage.has_states, []).append(
                lowered.cost_analysis()["flops"]
            )
    assert found[True][::2] == found[True][1::2]
    assert all(
        short < long for short, long in zip(found[False][::2], found[False][1::2], strict=True)
    )
