"""The lowered text of an engine's programs, to show that a change leaves them as they were.

`--write DIR` keeps the text of all programs, `--compare DIR` names those that another version of the code lowers to
other text. The programs are those of a model of each family whose layers have the same window, with the sizes of a
published one and two layers, samplers of all widths for 16 rows, and copies of blocks: for CPUs with and without the
library, and for a TPU and a GPU that may be absent. Names and locations are removed, also from the kernels within.
"""

import argparse
import base64
import gzip
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
from jax._src.interpreters.mlir import make_ir_context
from jax.extend.mlir import ir
from jax.sharding import Mesh
from jaxlib.mosaic.python import mosaic_gpu, tpu

from orca_jax.assembly.executor import arrange
from orca_jax.exec.programs import Programs
from orca_jax.kernels.native import Library, load_library
from orca_jax.model.describe import config_from_hf, read_model_config
from orca_jax.model.load import Loading, tensor_mesh
from orca_jax.values.cache_spec import form_groups
from orca_jax.values.config import CacheConfig, DType, ExecutorConfig, LoraConfig, ModelConfig
from orca_jax.values.platforms import platform_named
from tests.aot import gpu as gpus
from tests.aot import tpu as tpus
from tests.project.source import ROOT

BUCKETS = (1, 16, 128)
NUM_ROWS = 16
MAX_MODEL_LEN = 1024
LAYERS = 2
_BYTECODE = b"ML\xefR"  # its first bytes
_NAMES = re.compile(r'jax\.result_info = "[^"]*"|sym_name = "[^"]*"')


def add_args(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command."""
    way = parser.add_mutually_exclusive_group(required=True)
    way.add_argument("--write", type=Path, metavar="DIR", help="write the texts into DIR")
    way.add_argument(
        "--compare",
        type=Path,
        metavar="DIR",
        help="compare with the texts of DIR; 1 if one differs",
    )
    parser.add_argument(
        "--only",
        default="",
        metavar="REGEX",
        help="programs whose name, such as H200/gpt2, matches",
    )


def run(args: argparse.Namespace) -> int:
    """Write or compare all texts. Return 1 if one differs."""
    jax.config.update("jax_platforms", "cpu")
    folder = args.write or args.compare
    count = 0
    differing = 0
    for name, lower in programs(re.compile(args.only)):
        text = text_of(lower()).encode()
        path = folder / f"{name}.mlir.gz"
        count += 1
        if args.compare:
            if path.is_file() and gzip.decompress(path.read_bytes()) == text:
                continue
            differing += 1
            path = folder / f"{name}.new.mlir.gz"
            print(f"{name} differs: zdiff it with {path}", flush=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(text))
    print(json.dumps({"programs": count, "differing": None if args.write else differing}))
    return int(differing > 0 or not count)


def programs(wanted: re.Pattern[str]) -> Iterator[tuple[str, Callable[[], jax.stages.Lowered]]]:
    """The names and lowering functions of all programs whose names match."""
    for device, mesh, library in devices():
        platform = mesh.devices.flat[0].platform
        dtype: DType = "float32" if platform == "cpu" else "bfloat16"
        for family, model in models().items():
            groups = form_groups(model.layer_caches, MAX_MODEL_LEN)
            cache = CacheConfig(
                groups, (64,), 128, dtype, "head_major" if platform == "cpu" else "token_major"
            )
            config = ExecutorConfig(
                dtype,
                1,
                BUCKETS,
                NUM_ROWS,
                MAX_MODEL_LEN,
                cache,
                has_library=library is not None,
                lora=LoraConfig(2, 8),
                copies_blocks=True,
            )
            decoder = Loading(model, dtype, None, 0).shapes(mesh)
            arrange(platform_named(platform), decoder, library)
            if library is not None:
                decoder.pack(library, 1)
            with jax.set_mesh(mesh):  # Pallas takes the generation from the mesh
                for (kind, size), lower in Programs(decoder, config, mesh).lowerings().items():
                    if wanted.search(name := f"{device}/{family}/{kind}-{size}"):
                        yield name, lower


def devices() -> Iterator[tuple[str, Mesh, Library | None]]:
    """The devices by name, with the library for CPUs."""
    here = tensor_mesh(jax.devices()[:1])
    yield "cpu", here, None
    yield "library", here, load_library(None)
    yield "v6e", tpus.mesh_of("v6e", 1), None
    yield "H200", gpus.mesh_of("H200"), None


def models() -> dict[str, ModelConfig]:
    """A model of each family whose layers have the same window, with few layers."""
    fixtures = ROOT / "tests" / "fixtures"
    published = json.loads((fixtures / "configs" / "hub.json").read_text(encoding="utf-8")).values()
    known = [
        *map(config_from_hf, published),
        *map(read_model_config, sorted((fixtures / "reference").iterdir())),
    ]
    found: dict[str, ModelConfig] = {}
    for config in known:
        if len({kind.window for kind in config.layers}) == 1:
            found.setdefault(
                config.family, replace(config, layers=(config.layers * LAYERS)[:LAYERS])
            )
    return found


def text_of(lowered: jax.stages.Lowered) -> str:
    """The text of a program, without names and locations."""
    module: Any = lowered.compiler_ir()
    with module.context:
        module.operation.walk(_read_kernel)
    return _plain(module)


def _plain(module: Any) -> str:
    """The text of a module without locations; functions are numbered in the order of their first mention."""
    text = _NAMES.sub("", module.operation.get_asm(enable_debug_info=False))
    numbers = dict[str, str]()
    return re.sub(r"@[\w.$-]+", lambda name: numbers.setdefault(name[0], f"@{len(numbers)}"), text)


def _read_kernel(operation: Any) -> Any:
    """Replace the bytecode of a kernel by its text."""
    if operation.name == "stablehlo.custom_call":
        for name in ("backend_config", "mhlo.backend_config"):
            if name in operation.attributes:
                operation.attributes[name] = _readable(operation.attributes[name])
    return ir.WalkResult.ADVANCE


def _readable(attribute: Any) -> Any:
    """The attribute with text in place of bytecode, which calls for TPUs keep in base64 within JSON."""
    if isinstance(attribute, ir.DictAttr):
        named: Any = attribute
        # The hash is that of the bytecode, with its locations.
        return ir.DictAttr.get(
            {each.name: _readable(each.attr) for each in named if each.name != "kernel_hash"}
        )
    if not isinstance(attribute, ir.StringAttr):
        return attribute
    value: bytes = attribute.value_bytes
    if b'"custom_call_config"' in value:
        config = json.loads(value)
        value = base64.b64decode(config["custom_call_config"].pop("body"))
        config["custom_call_config"].pop("debug_locations", None)
        return ir.StringAttr.get(json.dumps(config) + _kernel_text(value))
    return ir.StringAttr.get(_kernel_text(value)) if value.startswith(_BYTECODE) else attribute


def _kernel_text(bytecode: bytes) -> str:
    with make_ir_context() as context:
        context.allow_unregistered_dialects = True
        for dialect in (tpu, mosaic_gpu):
            dialect.register_dialect(context)
        return _plain(ir.Module.parse(bytecode))
