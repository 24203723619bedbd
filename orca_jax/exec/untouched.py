"""Arrays on a CPU whose memory nothing has written: the system gives it at the first use of each part.

`jnp.empty` writes zeros on a CPU. For the KV cache of GPT-2 these are 5 GB, which take seconds of a start, and stay in
memory though no request uses them. XLA leaves the result of a custom call to the call, and the one here does nothing.
The structures are those of XLA's stable C interface (`xla/ffi/api/c_api.h`).
"""

import ctypes
import logging
from functools import cache

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

logger = logging.getLogger(__name__)

_TARGET = "orca_jax_untouched"
_METADATA = 1  # type of the extension that asks a handler for its version


class _Extension(ctypes.Structure):
    _fields_ = (("size", ctypes.c_size_t), ("type", ctypes.c_int), ("next", ctypes.c_void_p))


class _ApiVersion(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_size_t),
        ("extension", ctypes.c_void_p),
        ("major", ctypes.c_int),
        ("minor", ctypes.c_int),
    )


class _Api(ctypes.Structure):
    _fields_ = (("size", ctypes.c_size_t), ("extension", ctypes.c_void_p), ("version", _ApiVersion))


class _Metadata(ctypes.Structure):
    _fields_ = (("size", ctypes.c_size_t), ("version", _ApiVersion))


class _MetadataExtension(ctypes.Structure):
    _fields_ = (("base", _Extension), ("metadata", ctypes.POINTER(_Metadata)))


class _CallFrame(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_size_t),
        ("extension", ctypes.POINTER(_MetadataExtension)),
        ("api", ctypes.POINTER(_Api)),
    )


@ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_CallFrame))
def _handle(frame: "ctypes._Pointer[_CallFrame]") -> None:
    """Report the version of XLA's own interface when asked, and do nothing otherwise. None means success."""
    extension = frame.contents.extension
    if extension and extension.contents.base.type == _METADATA:
        ours = extension.contents.metadata.contents.version
        theirs = frame.contents.api.contents.version
        ours.major = theirs.major
        ours.minor = theirs.minor


@cache
def _register() -> None:
    jax.ffi.register_ffi_target(_TARGET, jax.ffi.pycapsule(_handle), platform="cpu")


def untouched(shape: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.Array:
    """An array of this shape on CPUs, with values without meaning. It has zeros if XLA does not accept the call."""
    part = jax.ShapeDtypeStruct(sharding.shard_shape(shape.shape), shape.dtype)
    create = jax.shard_map(
        jax.ffi.ffi_call(_TARGET, part),
        mesh=sharding.mesh,
        in_specs=(),
        out_specs=sharding.spec,
        check_vma=False,
    )
    try:
        _register()
        array: jax.Array = jax.jit(create)()
        return array.block_until_ready()
    # another interface than that of XLA today
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        logger.warning(
            "the KV cache takes all its memory at once: %s", str(error).partition("\n")[0]
        )
        return jax.jit(lambda: jnp.empty(shape.shape, shape.dtype), out_shardings=sharding)()
