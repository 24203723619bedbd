"""Converts a Hugging Face directory to a model directory with an Orbax checkpoint. Such a checkpoint loads by shards.
An Orbax checkpoint with optimiser state is converted to one with the parameters alone.

    python scripts/convert_checkpoint.py models/smol models/smol-orbax
    python scripts/convert_checkpoint.py models/smol models/smol-int8 --quantization int8

Configuration, tokenizer and chat template are copied. To save a model of your own training, call
`orca_jax.model.checkpoint.save_decoder` and put a config.json and a tokenizer.json beside its folder.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import get_args

import jax

from orca_jax.build.settings import quantised
from orca_jax.bundled import model_directory
from orca_jax.config import DType, EngineConfig, Quantization
from orca_jax.errors import ConfigError, OrcaError
from orca_jax.flags import FlagParser
from orca_jax.model.checkpoint import save_decoder
from orca_jax.model.describe import QUANT_METHOD, read_model_config
from orca_jax.model.load import load_decoder, tensor_mesh
from orca_jax.model.orbax_files import PARAMS
from orca_jax.progress import progress_bar

COPIED = ("*.json", "*.jinja", "*.model", "*.txt")
OF_WEIGHTS = ".index.json"  # the end of the lists of shards, of each format and variant
INCOMPLETE = "incomplete"


def main(argv: Sequence[str] | None = None) -> int:
    """Convert; returns 2 if the source cannot be read or the destination already has a checkpoint."""
    parser = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="directory with config.json and weights, or a name of the Hub (ORG/NAME)")
    parser.add_argument("destination", type=Path, help="model directory to write")
    parser.add_argument("--revision", help="branch, tag or commit of a model of the Hub")
    parser.add_argument(
        "--dtype", choices=get_args(DType), help="type of the written weights (default: as in config.json)"
    )
    parser.add_argument(
        "--quantization", choices=get_args(Quantization), help="write the weights in 8 or 4 bits (default: as they are)"
    )
    args = parser.parse_args(argv)
    try:
        source = Path(model_directory(args.source, args.revision))
        convert(source, args.destination, args.dtype, args.quantization)
    except (OrcaError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"wrote {args.destination}; try: python -m orca_jax.serve --model {args.destination}")
    return 0


def convert(
    source: Path, destination: Path, dtype: DType | None = None, quantization: Quantization | None = None
) -> None:
    """Write `source` to `destination`. The whole model passes through the memory of one device.

    Args:
        source: a model directory.
        destination: created if missing; must not hold a checkpoint or any file of the source's name.
        dtype: type of the written weights; None: as in config.json, or else float32.
        quantization: storage of linear layers and tables; None: as in the source.

    Raises:
        ConfigError: the source's configuration is wrong, or the destination holds such a file.
        CheckpointError: the source's weights do not fit its configuration.
    """
    config = quantised(EngineConfig(quantization=quantization), read_model_config(source))
    copied = [file for pattern in COPIED for file in sorted(source.glob(pattern)) if not file.name.endswith(OF_WEIGHTS)]
    names = [PARAMS, *(file.name for file in copied)]
    if found := [name for name in names if (destination / name).exists()]:
        message = f"{destination} already holds {', '.join(found)}; choose another destination, or remove them"
        raise ConfigError(message, param="destination")
    kept = dtype or _stored_dtype(source)
    mesh = tensor_mesh(jax.local_devices()[:1])
    decoder = load_decoder(source, dtype=kept, mesh=mesh, progress=progress_bar("Loading", True), config=config)
    fresh = destination / INCOMPLETE  # an interruption leaves this folder, and nothing that looks like a model
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    for file in copied:
        shutil.copy(file, fresh)
    changes: dict[str, object] = {}
    if decoder.config.tied_embeddings != config.tied_embeddings:  # the weights have a head of their own
        changes["tie_word_embeddings"] = False
    if config.quantization is not None:
        changes["quantization_config"] = {"quant_method": QUANT_METHOD, "weights": config.quantization}
    if changes:
        _change(fresh / "config.json", changes)
    save_decoder(decoder, fresh, kept)
    for name in sorted(names, key="config.json".__eq__):  # config.json last
        (fresh / name).rename(destination / name)
    fresh.rmdir()


def _change(file: Path, changes: Mapping[str, object]) -> None:
    values = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps({**values, **changes}, indent=2) + "\n", encoding="utf-8")


def _stored_dtype(source: Path) -> DType:
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    name = config.get("dtype") or config.get("torch_dtype")
    return name if name in get_args(DType) else "float32"


if __name__ == "__main__":
    sys.exit(main())
