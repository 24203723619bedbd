"""The fit of a calibration: a temperature and a prior of the labels, by Optax; and its measures.

The prior is a number for each label. It is held near zero, so that few rows cannot make much of it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float
from numpy.typing import NDArray

from orca_jax.text.decisions.reads import Fitted

STEPS = 400
RATE = 0.05
PENALTY = 0.02  # of squared priors, for each row
NUM_BINS = 15  # of the calibration error
ABSENT = -1e9  # log probability of a label that a row does not have


class LabelledAnswers(NamedTuple):
    """Answers of one kind, one row each."""

    logprobs: NDArray[np.float32]  # [rows, labels], `ABSENT` for labels that a row does not have
    answers: NDArray[np.int32]  # [rows]


class Measures(NamedTuple):
    """Measures of probabilities: lower is better, but for accuracy.

    Attributes:
        ece: expected calibration error of the most probable option, over 15 bins of equal width.
        brier: mean squared error over all options.
        nll: mean negative log likelihood, in nats.
        accuracy: share of rows whose most probable option is the answer.
    """

    ece: float
    brier: float
    nll: float
    accuracy: float


class _Free(NamedTuple):
    """What is fitted."""

    log_temperature: Float[Array, ""]
    bias: Float[Array, " L"]


def fit(rows: LabelledAnswers) -> Fitted:
    """The temperature and the prior with the least penalised loss."""
    logprobs = jnp.asarray(rows.logprobs)
    answers = jnp.asarray(rows.answers)
    optimiser = optax.adam(RATE)
    start = _Free(jnp.zeros(()), jnp.zeros(logprobs.shape[1]))

    def loss(free: _Free) -> Float[Array, ""]:
        scaled = (logprobs - free.bias) * jnp.exp(-free.log_temperature)
        losses = optax.softmax_cross_entropy_with_integer_labels(scaled, answers)
        return losses.mean() + PENALTY * (free.bias**2).sum() + PENALTY * free.log_temperature**2

    def step(_: object, state: tuple[_Free, optax.OptState]) -> tuple[_Free, optax.OptState]:
        free, momenta = state
        updates, momenta = optimiser.update(jax.grad(loss)(free), momenta)
        return optax.apply_updates(free, updates), momenta

    def fitted() -> tuple[_Free, optax.OptState]:
        return jax.lax.fori_loop(0, STEPS, step, (start, optimiser.init(start)))

    with jax.numpy_dtype_promotion("standard"):  # Optax counts its steps in integers
        free, _ = jax.jit(fitted)()
    bias = np.asarray(free.bias - free.bias.mean(), np.float64)
    return Fitted(float(np.exp(free.log_temperature)), tuple(bias.round(6).tolist()))


def cross_validated(rows: LabelledAnswers, folds: int, seed: int) -> NDArray[np.float64]:
    """The probabilities of each row by a fit to the rows of other folds, [rows, labels]."""
    number = len(rows.answers)
    fold_of = np.random.default_rng(seed).permutation(number) % folds
    found = np.zeros(rows.logprobs.shape)
    for fold in range(folds):
        held = fold_of == fold
        fitted = fit(LabelledAnswers(rows.logprobs[~held], rows.answers[~held]))
        found[held] = probabilities(rows.logprobs[held], fitted)
    return found


def probabilities(logprobs: NDArray[np.float32], fitted: Fitted) -> NDArray[np.float64]:
    """The probabilities of the labels of each row, [rows, labels]."""
    bias = np.zeros(logprobs.shape[1])
    bias[: len(fitted.bias)] = fitted.bias
    scaled = (logprobs.astype(np.float64) - bias) / fitted.temperature
    masses = np.exp(scaled - scaled.max(axis=1, keepdims=True))
    whole: NDArray[np.float64] = masses / masses.sum(axis=1, keepdims=True)
    return whole


def measure(found: NDArray[np.float64], answers: Sequence[int] | NDArray[np.int32]) -> Measures:
    """The measures of probabilities [rows, labels]."""
    number = len(answers)
    places = np.arange(number)
    best = found.argmax(axis=1)
    top = found[places, best]
    is_right = best == np.asarray(answers)
    bins = np.minimum((top * NUM_BINS).astype(int), NUM_BINS - 1)
    ece = 0.0
    for each in range(NUM_BINS):
        inside = bins == each
        if inside.any():
            gap = abs(top[inside].mean() - is_right[inside].mean())
            ece += gap * inside.mean()
    targets = np.zeros(found.shape)
    targets[places, answers] = 1
    nll = -np.log(np.maximum(found[places, answers], 1e-12)).mean()
    brier = ((found - targets) ** 2).sum(axis=1).mean()
    return Measures(float(ece), float(brier), float(nll), float(is_right.mean()))
