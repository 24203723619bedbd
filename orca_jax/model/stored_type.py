"""The type in which a model is stored, found without reading its values."""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from orca_jax.helpers.bundled import is_gguf, is_preset
from orca_jax.helpers.gguf_file.header import read_header as read_gguf
from orca_jax.model.describe import named_dtype, read_object
from orca_jax.model.files.folder import MAX_HEADER_BYTES
from orca_jax.model.files.opened import open_file
from orca_jax.model.files.safetensors import read_header
from orca_jax.values.config import DType

_NAMES: Mapping[str, DType] = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_WIDE = (
    "F64",
    "F32",
    "F16",
    "I8",
    "I16",
    "I32",
    "I64",
)  # types of tensors in GGUF files that are not quantised


def stored_dtype(source: str | Path) -> DType | None:
    """Return the type of the weights of a directory, a GGUF file or a preset; None if nothing says it.

    A directory has that of its config.json, or else of its safetensors. A GGUF file with bfloat16 or few bits counts
    as one in bfloat16, which is nearer to them than they are to the values before quantisation.

    Raises:
        ConfigError: a file cannot be read.
    """
    if is_preset(str(source)):
        return None
    if is_gguf(str(source)):
        kinds = {tensor.kind.name for tensor in read_gguf(Path(source)).tensors.values()}
        return "bfloat16" if kinds.difference(_WIDE) else "float32"
    directory = Path(source)
    return named_dtype(read_object(directory / "config.json")) or _of_tensors(directory)


def _of_tensors(directory: Path) -> DType | None:
    """The type of the most tensors of a file; None without safetensors, or if their loader will refuse them."""
    file = min(directory.glob("*.safetensors"), default=None)
    if file is None:
        return None
    try:
        with ExitStack() as opened:
            tensors, _ = read_header(open_file(file, opened), MAX_HEADER_BYTES)
            found = [tensor.dtype for tensor in tensors.values()]
    except OSError:
        return None
    return _NAMES.get(max(set(found), key=found.count, default=""))
