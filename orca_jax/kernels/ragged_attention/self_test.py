"""The self-test of attention kernels: a process that runs each one on the device, and compares it with plain XLA.

    python -m orca_jax.kernels.ragged_attention.self_test TRIAL

`TRIAL` is a `Trial` as JSON. A wrong kernel may also hang the device or kill its process, so the caller
(`orca_jax/assembly/self_test.py`) gives this process a time limit, and reads its lines up to then. Each line is JSON.
The first one names the chosen implementation, and its replacement if that is plain XLA. The second one has the result.
Implementations in plain XLA have no test.
"""

import json
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from orca_jax.kernels.backend import first_backend, named_backend
from orca_jax.kernels.kv_pages import HeadMajorPages, KVPages, RowArrays, pages_shape
from orca_jax.kernels.kv_write import write_kv
from orca_jax.kernels.ragged_attention import api
from orca_jax.kernels.ragged_attention.api import Scores
from orca_jax.kernels.ragged_attention.cases import Arrays, Case, make_arrays
from orca_jax.kernels.ragged_attention.xla import attend as ragged_attention_xla
from orca_jax.values.platforms import platform_of

_RUNS = 2  # of each batch: a race may show in one of them only
# allowed differences of outputs of order one: for 16 bits, for float32
_NARROW, _EXACT = 0.03, 1e-3


@dataclass(frozen=True)
class Trial:
    """The shapes of one model on one device, and the implementation to test."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: str  # of activations
    page_dtype: str
    has_values: bool = True  # False: latents
    implementation: str | None = None  # None: the device's default
    failed: tuple[str, ...] = ()  # implementations that are out of the question
    seconds: int = 120  # the process ends itself after this time, should its caller be gone

    def to_json(self) -> str:
        """The argument of the process."""
        return json.dumps(asdict(self))

    @classmethod
    def of_json(cls, text: str) -> "Trial":
        """Read the argument of the process."""
        fields = json.loads(text)
        return cls(**fields | {"failed": tuple(fields["failed"])})


def main(argv: Sequence[str], *, needs_test: Callable[[jax.Device], bool] | None = None) -> int:
    """Run a trial and print its lines; `needs_test` is true for devices with kernels, by default all except CPUs."""
    trial = Trial.of_json(argv[1])
    # Without a handler in Python the system ends the process, also within a call that never returns.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(trial.seconds)
    device = jax.local_devices()[0]
    if not (needs_test or _is_accelerator)(device):
        return 0
    if (name := choose(trial, device)) is None:
        return 0
    following = choose(replace(trial, failed=(*trial.failed, name)), device)
    plain = {backend.name for backend in api.BACKENDS if backend.is_plain}
    if following not in plain:
        following = None
    _print(implementation=name, is_plain=name in plain, plain_instead=following)
    if name in plain:
        return 0
    try:
        problem = try_kernels(trial, name, device)
    except Exception as error:
        _print(
            result="error", detail=f"{type(error).__name__}: {' '.join(str(error).split())[-400:]}"
        )
        return 1
    _print(result="wrong" if problem else "ok", detail=problem or "")
    return 0


def _is_accelerator(device: jax.Device) -> bool:
    return not platform_of(device).is_host


def _print(**line: Any) -> None:
    print(json.dumps(line), flush=True)


def choose(trial: Trial, device: jax.Device) -> str | None:
    """The name of the configured implementation, or else of the first one that has not failed.

    None if the configured one cannot be used here: that is an error of the configuration, not of the kernel.
    """
    left = [backend for backend in api.BACKENDS if backend.name not in trial.failed]
    page = trial.num_kv_heads, trial.head_dim, trial.page_size
    dtype = jnp.dtype(trial.page_dtype)
    pages = pages_shape("token_major", 8, *page, dtype, has_values=trial.has_values)
    q = jax.ShapeDtypeStruct((8, trial.num_heads, trial.head_dim), jnp.dtype(trial.dtype))
    if trial.implementation is not None and trial.implementation not in trial.failed:
        named = named_backend(left, trial.implementation)
        is_usable = named is not None and named.platform in (None, device.platform)
        if named is None or not is_usable or named.refusal(device, q, pages) is not None:
            return None
        return named.name
    backend = first_backend(left, device, q, pages)
    assert backend is not None, "the reference refuses nothing"
    return backend.name


def batches(trial: Trial) -> dict[str, Case]:
    """Batches of the same shapes, so that one program serves all: increments alone, chunks alone, and both."""
    most = 2 * trial.page_size + 9
    requests = {
        "increments": ((1, most), (1, 1), (1, trial.page_size), (1, trial.page_size + 1)),
        "chunks": ((min(70, most), most), (33, 33)),
        "increments with chunks": (
            (1, most),
            (1, trial.page_size),
            (40, 40 + trial.page_size // 2),
            (2, 2),
        ),
    }
    heads = trial.num_heads, trial.num_kv_heads, trial.head_dim, trial.page_size
    pages: Any = {
        "dtype": trial.dtype,
        "page_dtype": trial.page_dtype,
        "has_values": trial.has_values,
    }
    cases = {name: Case(name, batch, *heads, **pages) for name, batch in requests.items()}
    used = {name: sum([count for count, _ in batch]) for name, batch in requests.items()}
    num_tokens = 5 + max(used.values())
    padded = {}
    for name, case in cases.items():
        rows = 6 - len(case.requests)
        padded[name] = replace(case, padding_tokens=num_tokens - used[name], padding_rows=rows)
    return padded


def try_kernels(trial: Trial, name: str, device: jax.Device) -> str | None:
    """Run all batches by the implementation and by XLA. Returns the first difference in words, or None."""
    scores = Scores(trial.head_dim**-0.5)
    backend = named_backend(api.BACKENDS, name)
    assert backend is not None, "a name from the table"

    def kernels(
        q: jax.Array, k: jax.Array, v: jax.Array | None, pages: KVPages, requests: RowArrays
    ) -> Any:
        prepared = api.prepare(
            device, jax.ShapeDtypeStruct(q.shape, q.dtype), pages, requests, name
        )
        return api.write_and_attend(
            device, q, k, v, pages, prepared, jnp.int32(0), scores, implementation=name
        )

    def plain(
        q: jax.Array, k: jax.Array, v: jax.Array | None, pages: KVPages, requests: RowArrays
    ) -> Any:
        written = write_kv(pages, k, v, requests)
        with jax.default_matmul_precision("highest"):
            return ragged_attention_xla(q, written, requests, scores), written

    programs = jax.jit(kernels), jax.jit(plain)
    allowed = _EXACT if trial.dtype == trial.page_dtype == "float32" else _NARROW
    for batch, case in batches(trial).items():
        arrays = make_arrays(case, layout="token_major")
        new = np.random.default_rng(3).standard_normal(
            (2, arrays.q.shape[0], case.num_kv_heads, case.head_dim)
        )
        k, v = new.astype(jnp.dtype(case.dtype))
        v = v if case.has_values else None
        given = jax.tree.map(jnp.asarray, (arrays.q, k, v, *arrays[1:]))
        for _ in range(_RUNS):
            found, wanted = (jax.tree.map(np.asarray, program(*given)) for program in programs)
            if problem := _difference(arrays, found, wanted, allowed):
                return f"{batch}: {problem}"
    return None


def _difference(arrays: Arrays, found: Any, wanted: Any, allowed: float) -> str | None:
    """The first difference between two results of a layer, in words."""
    (out, pages), (expected, written) = found, wanted
    used = int(arrays.requests.query_len.sum())
    apart = np.abs(out[:used].astype(np.float32) - expected[:used].astype(np.float32)).max()
    if not apart <= allowed:  # also false for NaN
        return f"attention differs from XLA's by {apart:.3g}; {allowed} is allowed"
    if not np.isfinite(out.astype(np.float32)).all():
        return "the output of padding is not finite"
    for row, context in enumerate(arrays.requests.context_len.tolist()):
        stored, right = (
            _tokens_of(x, np.asarray(arrays.requests.page_table[row]), context)
            for x in (pages, written)
        )
        if not np.array_equal(stored, right):
            return "the written keys and values differ from XLA's"
    return None


def _tokens_of(pages: KVPages, page_list: np.ndarray, count: int) -> np.ndarray:
    """The stored keys and values of the first tokens of a row, `[count, W]`."""
    if isinstance(pages, HeadMajorPages):
        kv = np.moveaxis(np.asarray(pages.k)[page_list, 0], 1, 2)
    else:
        kv = np.asarray(pages.kv)[page_list]
    stored: np.ndarray = kv.reshape(-1, kv.shape[2])[:count].astype(np.float32)
    return stored


if __name__ == "__main__":
    sys.exit(main(sys.argv))
