"""Names of models in buckets and on web servers, and their specifications for TensorStore.

    gs://BUCKET/PATH      Google Cloud Storage; TENSORSTORE_GCS_HTTP_URL has another endpoint
    s3://BUCKET/PATH      S3 and services like it; AWS_ENDPOINT_URL and AWS_REGION have endpoint and region
    https://HOST/PATH     plain files of a web server that answers ranges of bytes

TensorStore finds the credentials as the tools of the clouds do.
"""

import re
from typing import Any, NamedTuple, Self

from orca_jax.helpers.buckets.environment import place_of_s3
from orca_jax.helpers.hub import BUCKET_DRIVERS
from orca_jax.values.checks import short
from orca_jax.values.errors import ConfigError

RETRIES = {"max_retries": 6, "initial_delay": "250ms", "max_delay": "8s"}
"""The further tries of a request, each after twice the delay of the one before: a quarter of a minute in all."""

MAX_KEY_BYTES = 1024  # of the names of objects, in both clouds
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,220}(:\d{1,5})?", re.ASCII)
_SEGMENT = re.compile(r"[^\x00-\x1f\x7f?#\\\ud800-\udfff]{1,255}")


def is_plain_key(key: str) -> bool:
    """Return True for the name of an object that is also a safe path of a file."""
    is_safe = all(_SEGMENT.fullmatch(part) and part not in (".", "..") for part in key.split("/"))
    return is_safe and len(key.encode()) <= MAX_KEY_BYTES


class BucketName(NamedTuple):
    """The folder of a model in a bucket.

    Attributes:
        scheme: the scheme of the name, such as "gs".
        bucket: the bucket, or the host with its port.
        path: the folder in it, without slashes at its ends; empty for the whole bucket.
    """

    scheme: str
    bucket: str
    path: str

    @classmethod
    def parse(cls, model: str, param: str = "model") -> Self:
        """Read a name. Raises ConfigError: it is not one; `param` is the setting with the name."""
        scheme, _, rest = model.partition("://")
        bucket, _, path = rest.partition("/")
        path = path.strip("/")
        if "@" in bucket:  # not repeated: it may be a password
            message = f"a name with {scheme}:// must not hold a user or a password; leave them out"
            raise ConfigError(message, param=param)
        if _BUCKET.fullmatch(bucket) is None or (path and not is_plain_key(path)):
            message = (
                f"{short(model)} is not the name of a folder in a bucket, as {scheme}://BUCKET/PATH"
            )
            raise ConfigError(message, param=param)
        if path.endswith(".gguf"):
            message = (
                f"{model}: GGUF files are read from disks only; download the file and give its path"
            )
            raise ConfigError(message, param=param)
        return cls(scheme, bucket, path)

    def url(self, key: str = "") -> str:
        """Return the name of an object, for people."""
        return f"{self.scheme}://{self.bucket}/{key}"

    def within(self, name: str) -> str:
        """Return the key of a file of the folder."""
        return f"{self.path}/{name}".removeprefix("/")

    @property
    def folders_above(self) -> tuple[str, ...]:
        """The paths of the folder and of the two above it."""
        parts = self.path.split("/")
        return tuple("/".join(parts[: len(parts) - up]) for up in range(min(3, len(parts) + 1)))

    def spec(self, prefix: str = "") -> dict[str, Any]:
        """Return the specification of TensorStore for the objects whose keys begin with a prefix."""
        driver = BUCKET_DRIVERS[self.scheme]
        found: dict[str, Any] = {"driver": driver, f"{driver}_request_retries": RETRIES}
        if driver == "http":
            return found | {"base_url": f"{self.scheme}://{self.bucket}", "path": f"/{prefix}"}
        found |= {"bucket": self.bucket, "path": prefix}
        if driver == "s3":
            found |= place_of_s3()
        return found
