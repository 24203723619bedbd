"""The paper's models by arithmetic: bytes, slots, FasterTransformer's limits, and the seconds of a stage."""

import pytest

from lab.paper.gpt import MODELS, Efficiency
from orca_jax.tools.plan.accelerators import ACCELERATORS, GIB

A100 = ACCELERATORS["a100-40"]


@pytest.mark.parametrize(
    ("name", "weight_gb", "slot_bytes", "num_slots"),
    [("13B", 25.7, 819_200, 15_600), ("101B", 25.3, 409_600, 32_000), ("175B", 21.9, 294_912, 56_000),
     ("341B", 21.4, 230_400, 75_000)],
)  # fmt: skip
def test_memory(name: str, weight_gb: float, slot_bytes: int, num_slots: int) -> None:
    model = MODELS[name]
    assert model.weight_bytes / 1e9 == pytest.approx(weight_gb, abs=0.05)
    assert model.slot_bytes == slot_bytes
    assert model.num_slots(A100) == pytest.approx(num_slots, rel=0.02)


def test_memory_by_hand() -> None:
    """13B: 12 x 40 x 5120^2 weights and 50,257 x 5120 of the embeddings, two bytes each, of 36 GiB."""
    weights = 2 * (12 * 40 * 5120**2 + 50_257 * 5120)
    assert MODELS["13B"].num_slots(A100) == int((36 * GIB - weights) / (2 * 40 * 5120 * 2))


@pytest.mark.parametrize(
    ("name", "runs", "fails"), [("13B", 4, 8), ("101B", 8, 16), ("175B", 16, 32)]
)
def test_batches_of_faster_transformer(name: str, runs: int, fails: int) -> None:
    """Section 6.1: 13B runs out of memory with batches of 8, and 101B with batches of 16."""
    assert runs <= MODELS[name].most_preallocated(A100) < fails


def test_a_larger_device_has_room() -> None:
    assert MODELS["13B"].most_preallocated(ACCELERATORS["a100-80"]) >= 16
    assert MODELS["175B"].num_slots(ACCELERATORS["v5e"]) < 0, (
        "16 devices of 16 GiB hold 256 GiB, and not the weights"
    )


def test_the_seconds_of_a_stage() -> None:
    """175B, 48 layers on 8 devices: 24 x 48 x 12288^2 / 8 bytes and as many operations for each token."""
    cost = MODELS["175B"].cost(A100, Efficiency(memory=0.52, compute=0.47))
    assert cost.weights == pytest.approx(24 * 48 * 12288**2 / 8 / (1.555e12 * 0.52))
    assert cost.weights == pytest.approx(26.9e-3, rel=0.01)
    assert cost.initiation == cost.increment == pytest.approx(0.148e-3, rel=0.01)
    assert cost.context == pytest.approx(0.36e-6, rel=0.02)
