"""Objects of a bucket, read by TensorStore, which tries failed requests again."""

from collections.abc import Iterable, Iterator
from importlib.metadata import version
from typing import Any

from orca_jax.helpers.buckets.environment import end_silent_connections
from orca_jax.helpers.buckets.names import BucketName
from orca_jax.helpers.buckets.problems import Beyond, BucketError, NotAllowed, changed, error_of

_OLDEST = (0, 1, 81)
_SECONDS = 180.0  # of one read with all of its tries


class Bucket:
    """An open bucket.

    Args:
        name: its name.

    Raises:
        BucketError: it cannot be opened.
    """

    def __init__(self, name: BucketName) -> None:
        _check_version()
        end_silent_connections()
        import tensorstore  # 0.1 s, which other models do not need

        self.name = name
        try:
            opened = tensorstore.KvStore.open(name.spec())
        except ValueError:  # the clouds have rules for names
            raise BucketError(f"{name.url()} is not a name of a bucket; check it") from None
        self._store = self._waited("", opened)

    def generations(self, keys: Iterable[str]) -> dict[str, str]:
        """Return the versions of existing objects, by key. All are asked for at once.

        Raises:
            BucketError: the store does not answer. NotAllowed: none can be read, and one is refused.
        """
        started = {key: self._store.read(key, byte_range=slice(0, 0)) for key in keys}
        found: dict[str, str] = {}
        refused: list[NotAllowed] = []
        for key, future in started.items():
            try:
                answer = self._waited(key, future)
            except NotAllowed as error:
                refused.append(error)
                continue
            if answer.state == "value":
                found[key] = _generation(answer)
        if refused and not found:
            raise refused[0]
        return found

    def whole(self, key: str, generation: str, limit: int) -> bytes:
        """Return a small object. Raises BucketError, also if it has more than `limit` bytes."""
        if self._has(key, limit):
            raise BucketError(f"{self.name.url(key)} has more than {limit} bytes")
        return self._checked(key, generation, self._store.read(key))

    def read(self, key: str, generation: str, begin: int, end: int) -> bytes:
        """Return the bytes of an object from `begin` to before `end`. Raises BucketError."""
        (part,) = self.ranges(key, generation, [slice(begin, end)])
        return part

    def ranges(self, key: str, generation: str, parts: Iterable[slice]) -> Iterator[bytes]:
        """Yield parts of an object in order. All are requested at once. Raises BucketError."""
        for future in [self._store.read(key, byte_range=part) for part in parts]:
            yield self._checked(key, generation, future)

    def pieces(self, key: str, step: int) -> Iterator[bytes]:
        """Yield the bytes of an object of unknown size, at most `step` at once. Raises BucketError."""
        generation = self.generations([key]).get(key)
        if generation is None:
            raise BucketError(f"{self.name.url(key)} is missing; copy it there")
        begin = 0
        while step:
            if self._has(key, begin + step - 1):
                yield self.read(key, generation, begin, begin + step)
                begin += step
            else:  # the rest is shorter
                step //= 2

    def ends_at(self, key: str, size: int) -> bool:
        """Return True if an object has exactly so many bytes, of which one is read. Raises BucketError."""
        return self._has(key, size - 1) and not self._has(key, size)

    def _has(self, key: str, place: int) -> bool:
        """True if an object has a byte at this place. Raises BucketError."""
        one = slice(place, place + 1)
        try:
            answer = self._waited(key, self._store.read(key, byte_range=one))
        except Beyond:
            return False
        return bool(answer.state == "value")

    def _checked(self, key: str, generation: str, future: Any) -> bytes:
        """The bytes of an answer of the known version of an object. Raises BucketError."""
        answer = self._waited(key, future)
        if answer.state != "value" or _generation(answer) != generation:
            raise BucketError(changed(self.name.url(key)))
        content: bytes = answer.value
        return content

    def _waited(self, key: str, future: Any) -> Any:
        """The result of a request. Raises BucketError."""
        try:
            return future.result(timeout=_SECONDS)
        except Exception as error:  # TensorStore raises several kinds
            problem = error_of(self.name.url(key), error)
        raise problem  # without the texts of the server, which the context of an error would show


def _check_version() -> None:
    """Refuse a TensorStore without ranges. Raises BucketError."""
    found = version("tensorstore")
    if tuple(map(int, found.split(".")[:3])) < _OLDEST:
        needed = ".".join(map(str, _OLDEST))
        message = f"buckets need tensorstore {needed} or newer, and {found} is installed"
        raise BucketError(f"{message}; type: pip install -U tensorstore")


def _generation(answer: Any) -> str:
    generation: bytes = answer.stamp.generation
    return generation.hex()
