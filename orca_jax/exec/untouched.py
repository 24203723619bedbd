"""Arrays on a CPU whose memory nothing has written: the system gives it at the first use of each part.

`jnp.empty` writes zeros on a CPU. For the KV cache of GPT-2 these are 5 GB, which take seconds of a start. XLA leaves
the result of a custom call to the call, and the one here does nothing. The structures are those of XLA's stable C
interface (`xla/ffi/api/c_api.h`). While no launch runs, a thread asks for the memory, so that requests need not wait.
"""

import ctypes
import logging
import mmap
import sys
import threading
from collections.abc import Callable, Sequence
from functools import cache

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

logger = logging.getLogger(__name__)

_TARGET = "orca_jax_untouched"
_POPULATE_WRITE = 23  # advice of Linux
_AT_ONCE = 1 << 20  # bytes: a millisecond
_PAUSE_SECONDS = 0.05  # between looks while launches run
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
        ours, theirs = extension.contents.metadata.contents.version, frame.contents.api.contents.version
        ours.major, ours.minor = theirs.major, theirs.minor


@cache
def _register() -> None:
    jax.ffi.register_ffi_target(_TARGET, jax.ffi.pycapsule(_handle), platform="cpu")


def untouched(shape: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.Array:
    """An array of this shape on CPUs, with values without meaning. It has zeros if XLA does not accept the call."""
    part = jax.ShapeDtypeStruct(sharding.shard_shape(shape.shape), shape.dtype)
    create = jax.shard_map(
        jax.ffi.ffi_call(_TARGET, part), mesh=sharding.mesh, in_specs=(), out_specs=sharding.spec, check_vma=False
    )
    try:
        _register()
        array: jax.Array = jax.jit(create)()
        return array.block_until_ready()
    except (jax.errors.JaxRuntimeError, ValueError) as error:  # another interface than that of XLA today
        logger.warning("the KV cache takes all its memory at once: %s", str(error).partition("\n")[0])
        return jax.jit(lambda: jnp.empty(shape.shape, shape.dtype), out_shardings=sharding)()


class Populating:
    """Asks the system for the memory of arrays, a little at a time, in a thread. Nothing is written.

    It pauses while launches run. With a low priority instead, it had a quarter of the processors' time beside them
    (docs/decisions.md, "Launches and programs").

    The arrays may be donated meanwhile, as long as their memory stays in use. Systems other than Linux 5.14 or later
    give memory at its first use, as they always do.

    Args:
        arrays: arrays on CPUs.
        is_idle: True if no launch runs; called in the thread.
    """

    def __init__(self, arrays: Sequence[jax.Array], is_idle: Callable[[], bool]) -> None:
        shards = [shard.data for array in arrays for shard in array.addressable_shards]
        self._ranges = [(shard.unsafe_buffer_pointer(), shard.nbytes) for shard in shards]
        self._is_idle = is_idle
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="populate", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop before the arrays are freed."""
        self._stopped.set()
        if self._thread is not threading.current_thread():  # which may collect the garbage that this belongs to
            self._thread.join()

    def _run(self) -> None:
        if sys.platform != "linux":
            return
        madvise = ctypes.CDLL(None, use_errno=True).madvise
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        for start, size in self._ranges:
            first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
            last = (start + size) // mmap.PAGESIZE * mmap.PAGESIZE
            for address in range(first, last, _AT_ONCE):
                while not (self._is_idle() or self._stopped.is_set()):
                    self._stopped.wait(_PAUSE_SECONDS)
                if self._stopped.is_set() or madvise(address, min(_AT_ONCE, last - address), _POPULATE_WRITE):
                    return
