"""1,000 damaged adapters through a running server: each is loaded or refused, and none ends the engine or takes long.

The damages are those of `tests/mutations.py`; every twentieth adapter has a file that is cut while it is read.
"""

import os
import random
import time
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import httpx
import pytest

from orca_jax.model.describe import read_model_config
from orca_jax.model.lora.peft_config import CONFIG
from orca_jax.model.lora.peft_files import WEIGHTS, read_adapter
from orca_jax.values.config import LoraConfig
from orca_jax.values.errors import CheckpointError
from tests.lora.directories import LLAMA, write_adapter
from tests.model.mutated.child import SHRINKING, mutate_text
from tests.model.reference import REFERENCE
from tests.mutations import mutate_safetensors, shrinking
from tests.serve.running import Server, running

ADAPTERS = 1000
SECONDS = 10  # for one adapter, on a busy machine
MODEL = str(REFERENCE / LLAMA)
GREEDY = {"temperature": 0, "max_tokens": 8, "ignore_eos": True, "return_token_ids": True}
MUTATIONS = {CONFIG: mutate_text, WEIGHTS: mutate_safetensors}
Whole = dict[str, bytes]


def damage(folder: Path, whole: Whole, seed: int, number: int) -> tuple[Path, random.Random] | None:
    """Write the adapter of a number. Returns a file that has to be cut while it is read, if there is one.

    Odd numbers have another bit in some values of their tensors alone, so that about half of the files are loaded.
    """
    dice = random.Random(f"adapter {seed} {number}")
    damaged = dice.choice(([CONFIG], [WEIGHTS], [WEIGHTS], [CONFIG, WEIGHTS]))
    is_cut = number % SHRINKING == 0
    if number % 2:
        damaged, changed = [], bytearray(whole[WEIGHTS])
        first = 8 + int.from_bytes(changed[:8], "little")
        for _ in range(dice.randint(1, 8)):
            changed[dice.randrange(first, len(changed))] ^= 1 << dice.randrange(8)
        whole = {**whole, WEIGHTS: bytes(changed)}
    for name, data in whole.items():
        (folder / name).write_bytes(
            MUTATIONS[name](data, dice) if name in damaged and not is_cut else data
        )
    return (folder / dice.choice(damaged), dice) if is_cut else None


def fault_of(message: str, folder: Path) -> str | None:
    """The reason for which the message of a refusal is not clear, or None."""
    message.encode()
    return (
        None if str(folder) in message and len(message) < 20_000 else f"not clear: {message[:300]}"
    )


def complete(server: Server, model: str) -> httpx.Response:
    return server.http.post("/v1/completions", json={"model": model, "prompt": "hi", **GREEDY})


def outcome(server: Server, folder: Path, name: str) -> str:
    """Load an adapter, use it and unload it. Returns "loaded", "refused", or the fault."""
    done = server.http.post(
        "/v1/load_lora_adapter", json={"lora_name": name, "lora_path": folder.name}
    )
    if done.status_code == 400:
        error = done.json()["error"]
        return fault_of(error["message"], folder) or (
            "refused" if error["param"] == "lora_path" else done.text
        )
    if done.status_code != 200:
        return f"{done.status_code}: {done.text[:300]}"
    answer = complete(server, name)
    gone = server.http.post("/v1/unload_lora_adapter", json={"lora_name": name})
    if gone.status_code != 200:
        return f"unload: {gone.text[:300]}"
    # large values, not NaN, pass the reader
    is_infinite = answer.status_code == 500 and "not finite" in answer.text
    return (
        "loaded"
        if answer.status_code == 200 or is_infinite
        else f"{answer.status_code}: {answer.text[:300]}"
    )


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_adapter_ends_the_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seed = int(os.environ.get("MUTATION_SEED", random.randrange(2**32)))
    folder = write_adapter(tmp_path / "mutated", 1)
    whole = {name: (folder / name).read_bytes() for name in MUTATIONS}
    sizes = (
        "--max-num-seqs",
        "2",
        "--max-num-batched-tokens",
        "16",
        "--max-model-len",
        "64",
        "--max-lora-rank",
        "4",
    )
    flags = ("--tokenizer", "byte", "--enable-lora", "--lora-dir", str(tmp_path), *sizes)
    counts, faults, longest = Counter[str](), dict[int, str](), 0.0
    with running(*flags, model=MODEL) as server:
        first, pid, begun = (
            complete(server, MODEL).json()["choices"],
            server.engine().pid,
            time.monotonic(),
        )
        for number in range(ADAPTERS):
            to_cut = damage(folder, whole, seed, number)
            at = time.monotonic()
            with shrinking(*to_cut) if to_cut else nullcontext():
                found = outcome(server, folder, f"adapter-{number}")
            longest = max(longest, seconds := time.monotonic() - at)
            counts[found] += found in ("loaded", "refused")
            if found not in ("loaded", "refused") or seconds > SECONDS:
                faults[number] = f"{found}, {seconds:.1f} s"
        seconds = time.monotonic() - begun
        with capsys.disabled():
            print(
                f"\nadapters: {dict(counts)}, {len(faults)} faults, seed {seed}, {seconds:.0f} s, at most {longest:.2f}"
            )
        assert not faults, f"seed {seed}: {faults}"
        assert server.engine().pid == pid and complete(server, MODEL).json()["choices"] == first
    assert counts.total() == ADAPTERS and min(counts["loaded"], counts["refused"]) >= ADAPTERS // 20


def test_some_damaged_adapters(tmp_path: Path) -> None:
    """The first adapters of a fixed seed, read without a server, for the default run.

    The file of number 0 is cut while it is read, so its outcome depends on threads; it is clear in both cases.
    """
    folder = write_adapter(tmp_path / "mutated", 1)
    whole = {name: (folder / name).read_bytes() for name in MUTATIONS}
    model, counts = read_model_config(MODEL), Counter[str]()
    for number in range(7):
        to_cut = damage(folder, whole, 0, number)
        try:
            with shrinking(*to_cut) if to_cut else nullcontext():
                read_adapter(folder, model, LoraConfig(num_slots=1, max_rank=4), "float32")
            counts["loaded"] += number > 0
        except CheckpointError as error:
            assert fault_of(error.message, folder) is None
            counts["refused"] += number > 0
    assert counts == {"loaded": 3, "refused": 3}
