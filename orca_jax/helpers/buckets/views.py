"""Folders of this machine in place of folders of buckets.

A folder holds the small files of a model, and in place of each object with weights, which is read by range, a file with
its version. All processes of this user share it by its revision, a digest of all versions.
"""

import hashlib
import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from orca_jax.helpers.buckets.folders import hold, make, shared_root
from orca_jax.helpers.buckets.names import BucketName, is_plain_key
from orca_jax.helpers.buckets.problems import BucketError
from orca_jax.helpers.buckets.store import Bucket
from orca_jax.helpers.hub import INDEX, SETTINGS, SINGLE
from orca_jax.helpers.orbax_names import (
    CHECKPOINT_METADATA,
    DIGESTS,
    MANIFEST,
    MAPPING,
    METADATA,
    PARAMS,
    TREE_FOLDERS,
)
from orca_jax.values.errors import ConfigError, system_message

MAX_SHARDS = 4_000
_MIB = 2**20
_LIMITS = {
    **dict.fromkeys(SETTINGS, 256 * _MIB),
    INDEX: 32 * _MIB,
    MAPPING: _MIB,
    DIGESTS: 64 * _MIB,
    METADATA: 64 * _MIB,
}
"""The most bytes of each copied file."""
_CONFIG = "config.json"
_TOKENIZER = "tokenizer.json"
_OBJECTS = "objects.json"

logger = logging.getLogger(__name__)


class BucketView(NamedTuple):
    """A folder of a bucket, in one version.

    Attributes:
        name: the folder in the bucket.
        revision: the digest of the versions of its objects.
        keys: the object of each file, by its path in the folder.
        generations: the version of each object, by its key.
    """

    name: BucketName
    revision: str
    keys: Mapping[str, str]
    generations: Mapping[str, str]

    @property
    def folder(self) -> Path:
        """The folder of this machine. Its path ends with the name in the bucket, for messages."""
        return shared_root() / self.revision / self._place

    @property
    def _place(self) -> Path:
        return Path(self.name.scheme, self.name.bucket, self.name.path)

    def files(self, contents: Mapping[str, bytes]) -> dict[str, bytes]:
        """Return the files of the shared folder, from the contents of small ones."""
        found = {_OBJECTS: json.dumps(self).encode()}
        for each, key in self.keys.items():
            found[str(self._place / each)] = contents.get(each, self.generations[key].encode())
        return found

    def changes(self) -> list[str]:
        """Return the keys of the objects that have another version now. Raises BucketError."""
        now = Bucket(self.name).generations(self.generations)
        return sorted(key for key, each in self.generations.items() if now.get(key) != each)


def view_of(model: str, revision: str | None = None, param: str = "model") -> BucketView:
    """Return the view of a folder of a bucket, after its small files are read.

    Nothing is read if a process of this machine has the wanted revision.

    Args:
        model: the name, such as "gs://BUCKET/PATH".
        revision: the revision that it must have; None for the present one.
        param: the setting with the name, for errors.

    Raises:
        ConfigError: the name is wrong, config.json (of a tokenizer tokenizer.json) is missing, the bucket has another
            revision, or an object cannot be read. The message names the object.
    """
    name = BucketName.parse(model, param)
    try:
        if revision is not None and _is_revision(revision) and hold(revision):
            return _stored(shared_root(), revision)
        view, contents = _read(Bucket(name), _TOKENIZER if param == "tokenizer" else _CONFIG)
        if revision not in (None, view.revision):
            message = f"{model} has the revision {view.revision}, and not {revision}: its files were changed"
            raise ConfigError(f"{message}; start again when they are complete", param="revision")
        make(view.revision, view.files(contents))
    except BucketError as error:
        raise ConfigError(str(error), param=param) from None
    except OSError as error:
        message = f"the folder for {model} cannot be written: {system_message(error)}"
        raise ConfigError(f"{message}; set TMPDIR to another one", param=param) from None
    logger.info("%s has the revision %s", model, view.revision)
    return view


def located(path: Path) -> tuple[BucketView, str] | None:
    """Return the view with a file or a folder, and its name in the bucket; None for a path in no view."""
    root = shared_root()
    if root not in path.parents:
        return None
    view = _stored(root, path.relative_to(root).parts[0])
    inner = path.relative_to(view.folder).as_posix()
    if inner in view.keys:
        return view, view.keys[inner]
    return view, view.name.within("" if inner == "." else inner).removesuffix("/")


def shown(folder: Path) -> str:
    """Return the name of a folder for messages; a view has its name in the bucket."""
    if (place := located(folder)) is None:
        return str(folder)
    view, key = place
    return view.name.url(key)


def _read(bucket: Bucket, needed: str) -> tuple[BucketView, dict[str, bytes]]:
    """The view of a bucket, and the contents of its small files. Raises BucketError."""
    keys = _settings(bucket, needed)
    keys |= {each: bucket.name.within(each) for each in (SINGLE, INDEX, DIGESTS, *_marks())}
    generations = bucket.generations(keys.values())
    contents: dict[str, bytes] = {}
    for each, key in keys.items():
        limit = _LIMITS.get(each.rpartition("/")[2])
        if key in generations and limit is not None:
            contents[each] = bucket.whole(key, generations[key], limit)
    weights = [*_shards(contents.get(INDEX, b"")), *map(_manifest, filter(_is_tree, contents))]
    others = {each: bucket.name.within(each) for each in weights}
    keys |= others
    generations |= bucket.generations(others.values())
    keys = {each: key for each, key in keys.items() if key in generations}
    content = json.dumps([bucket.name, sorted(keys.items()), sorted(generations.items())])
    revision = hashlib.sha256(content.encode()).hexdigest()
    return BucketView(bucket.name, revision, keys, generations), contents


def _settings(bucket: Bucket, needed: str) -> dict[str, str]:
    """The keys of the settings by their names: all beside the needed one, which may be in a folder above."""
    places = [f"{folder}/{needed}".lstrip("/") for folder in bucket.name.folders_above]
    generations = bucket.generations(places)
    home = next((key for key in places if key in generations), None)
    if home is None:
        above = "" if len(places) == 1 else ", also in the folders above"
        message = (
            f"{bucket.name.url(places[0])} is missing{above}; put {_CONFIG} and {_TOKENIZER} there"
        )
        raise BucketError(message)
    return {each: home.removesuffix(needed) + each for each in (*SETTINGS, MAPPING)}


def _marks() -> Iterator[str]:
    """The marks of Orbax: files of each folder that may hold a tree, and of the two above trees."""
    for parts in product(("", PARAMS), ("", *TREE_FOLDERS), (METADATA,)):
        yield "/".join(filter(None, parts))
    yield from (CHECKPOINT_METADATA, f"{PARAMS}/{CHECKPOINT_METADATA}")


def _shards(index: bytes) -> Iterable[str]:
    """The files that an index of weights names; the loader reports what is wrong with it."""
    try:
        names = {str(name) for name in json.loads(index)["weight_map"].values()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return ()
    plain = sorted(name for name in names if "/" not in name and is_plain_key(name))
    return plain[:MAX_SHARDS]


def _is_tree(name: str) -> bool:
    return name.rpartition("/")[2] == METADATA


def _manifest(tree: str) -> str:
    """The file beside the metadata of a tree whose arrays are in one database."""
    return tree.removesuffix(METADATA) + MANIFEST


def _is_revision(text: str) -> bool:
    return len(text) == 2 * hashlib.sha256().digest_size and text.isalnum()


@cache
def _stored(root: Path, revision: str) -> BucketView:
    """The view with a revision, as it was written. Raises OSError."""
    values: list[Any] = json.loads((root / revision / _OBJECTS).read_text(encoding="utf-8"))
    name, *others = values
    return BucketView(BucketName(*name), *others)
