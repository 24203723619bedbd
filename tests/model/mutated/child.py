"""Load damaged files one after another, in a process of their own: `python -m tests.model.mutated.child KIND ...`.

Each number gives the same file for the same seed. A line of JSON says when a file begins, another one how it ended. A
file that takes too long ends the process.
"""

import faulthandler
import json
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from itertools import batched
from pathlib import Path
from random import Random

from orca_jax.values.errors import ConfigError
from tests.model.published.directories import FORMS
from tests.mutations import mutate_bytes, mutate_gguf, mutate_json, mutate_safetensors, shrinking

SHRINKING = 20  # each file of such a number is cut while it is read
Kind = tuple[str, Callable[[bytes, Random], bytes], Callable[[Path], None]]


def mutate_text(data: bytes, random: Random) -> bytes:
    """Damages of a JSON text: half of them keep it valid, and some are nested deeply."""
    match random.randrange(10):
        case 0:
            depth = random.choice((60, 100, 1000, 200_000))
            at = data.index(b":") + 1
            return (
                data[:at] + b"[" * depth + b"]" * (depth * random.randrange(2)) + b"," + data[at:]
            )
        case 1 | 2 | 3 | 4:
            return mutate_bytes(data, random)
        case _:
            return mutate_json(data, random)


def load_model(directory: Path) -> None:
    """Read the configuration and the weights, as an engine does with products of XLA."""
    _load(directory, keeps_bits=False)


def load_bits(directory: Path) -> None:
    """The same with the library in C: integers keep their bits."""
    _load(directory, keeps_bits=True)


def _load(directory: Path, *, keeps_bits: bool) -> None:
    import jax

    from orca_jax.assembly.executor import arrange_for, place_model
    from orca_jax.kernels.native import load_library
    from orca_jax.model.describe import read_model_config
    from orca_jax.text.generation_config import read_generation_defaults

    source = str(directory)
    model = read_model_config(source)
    if directory.is_dir():
        read_generation_defaults(source, "auto")
    placed = place_model(
        source,
        model,
        dtype="float32",
        load_format="auto",
        seed=0,
        devices=jax.devices()[:1],
        num_stages=1,
    )
    (stage,) = placed.stages
    weights = placed.weights
    library = load_library(None) if keeps_bits else None
    arranged = partial(arrange_for, weights.keep_bits, jax.devices()[:1], library)
    weights.load(stage.mesh, span=stage.shapes.span, arrange=arranged)


def load_text(directory: Path) -> None:
    """Load a tokenizer, and encode and decode with it."""
    from orca_jax.text.tokenizer import load_tokenizer
    from orca_jax.values.errors import RequestError

    tokenizer = load_tokenizer(directory)
    with suppress(RequestError):  # a call is refused, and others go on
        tokenizer.decode(tokenizer.encode("The sea was 12 times <|end|> é \U0001f600"))


KINDS: Mapping[str, Kind] = {
    **{form: ("model.safetensors", mutate_safetensors, load_bits) for form in FORMS},
    "safetensors": ("model.safetensors", mutate_safetensors, load_model),
    "gguf": ("model.gguf", mutate_gguf, lambda directory: load_model(directory / "model.gguf")),
    "config": ("config.json", mutate_text, load_model),
    "mapping": ("mapping.json", mutate_text, load_model),
    "tokenizer": ("tokenizer.json", mutate_text, load_text),
}
"""The file, its damages, and its reader."""


def outcome(directory: Path, kind: Kind, random: Random, whole: bytes, number: int) -> str:
    """Damage the file, and read it. Returns "loaded", "refused", or the fault."""
    name, mutate, load = kind
    path = directory / name
    cut = number % SHRINKING == 0
    path.write_bytes(whole if cut else mutate(whole, random))
    try:
        with shrinking(path, random) if cut else nullcontext():
            load(directory)
    except ConfigError as error:
        error.message.encode()
        is_named = name in error.message or str(directory) in error.message
        return "refused" if is_named else f"the file is not named: {error.message[:300]}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:300]
    return "loaded"


def read(kind: str, directory: str, seed: str, first: str, last: str, seconds: str) -> None:
    """Read the files of some numbers."""
    path = Path(directory) / KINDS[kind][0]
    whole = Path(f"{path}.whole").read_bytes()
    for number in range(int(first), int(last)):
        print(json.dumps({"begun": number}), flush=True)
        faulthandler.dump_traceback_later(float(seconds), exit=True)
        found = outcome(
            Path(directory), KINDS[kind], Random(f"{kind} {seed} {number}"), whole, number
        )
        faulthandler.cancel_dump_traceback_later()
        print(json.dumps({"number": number, "outcome": found}), flush=True)


def main(words: Sequence[str]) -> None:
    """Read some files of several kinds: six words for each."""
    logging.disable()
    faulthandler.enable()
    for arguments in batched(words, 6):
        read(*arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
