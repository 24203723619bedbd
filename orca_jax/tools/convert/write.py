"""The conversion: the weights in, an Orbax checkpoint or safetensors out, and the whole directory at once."""

import contextlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

from orca_jax.helpers.console import progress_bar
from orca_jax.model.checkpoint import save_decoder
from orca_jax.model.describe import QUANTIZATION_CONFIG, quantization_config
from orca_jax.model.files.digests import write_digests
from orca_jax.model.load import load_decoder, tensor_mesh
from orca_jax.model.transformer import Decoder
from orca_jax.tools.convert.export import exported
from orca_jax.tools.convert.files import write_safetensors
from orca_jax.tools.convert.forms import FORMS
from orca_jax.tools.convert.source import CONFIG, Conversion


def convert(job: Conversion) -> None:
    """Write the output. An interruption leaves the old state, and nothing beside it.

    Raises:
        ConfigError: the weights cannot be found or opened, or the matrices cannot be in the output's format.
        CheckpointError: the weights do not fit the configuration.
        OSError: the output cannot be written.
    """
    mesh = tensor_mesh(jax.local_devices()[:1])
    decoder = load_decoder(
        job.source,
        dtype=job.dtype,
        mesh=mesh,
        load_format=job.load_format,
        progress=progress_bar("Loading", True),
        config=job.model,
    )
    print(f"Writing {job.output}", file=sys.stderr, flush=True)
    fresh = job.output.with_name(f".{job.output.name}.part")
    shutil.rmtree(fresh, ignore_errors=True)  # of a run that was killed
    try:
        fresh.mkdir(parents=True)
        for file in job.copied:
            shutil.copyfile(file, fresh / file.name)
        for name, text in job.made.items():
            (fresh / name).write_text(text, encoding="utf-8")
        settings = _write_weights(job, decoder, fresh)
        (fresh / CONFIG).write_text(_described(job, decoder, settings), encoding="utf-8")
        _replace(job.output, fresh)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _write_weights(job: Conversion, decoder: Decoder, folder: Path) -> dict[str, Any] | None:
    """Write the weights. Returns the `quantization_config`; None for plain ones."""
    if job.output_format == "orbax":
        save_decoder(decoder, folder, job.dtype)
        write_digests(folder)
        if job.model.quantization is None:
            return None
        return quantization_config(job.model.quantization)
    form = None
    if job.output_format != "safetensors":
        form = FORMS[job.output_format]
    progress = progress_bar("Writing", True)
    return write_safetensors(exported(decoder), form, np.dtype(job.dtype), folder, progress)


def _described(job: Conversion, decoder: Decoder, settings: dict[str, Any] | None) -> str:
    """The config.json of the written weights. The source's own text is kept if nothing changes."""
    changes: dict[str, object] = {}
    # the weights have a head of their own
    if decoder.config.tied_embeddings != job.model.tied_embeddings:
        changes["tie_word_embeddings"] = False
    values = dict(job.values)
    stored = values.pop(QUANTIZATION_CONFIG, None)
    if settings is not None:
        changes[QUANTIZATION_CONFIG] = settings
    if not changes and stored is None and job.source.is_dir():
        return (job.source / CONFIG).read_text(encoding="utf-8")
    return json.dumps({**values, **changes}, indent=2) + "\n"


def _replace(output: Path, fresh: Path) -> None:
    """Move `fresh` to `output`. A directory there is moved aside first, and back if the second move fails."""
    with contextlib.suppress(OSError):
        output.rmdir()  # an empty one
    if not output.exists():
        fresh.rename(output)
        return
    old = output.with_name(f".{output.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    output.rename(old)
    try:
        fresh.rename(output)
    except BaseException:
        old.rename(output)
        raise
    shutil.rmtree(old)
