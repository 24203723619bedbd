"""The environment of TensorStore's requests to buckets: what it takes from there alone, or leaves out."""

import os

_SILENT_SECONDS = "30"


def end_silent_connections() -> None:
    """Have TensorStore give up a connection that stays silent, unless the user has set this. Its default is never.

    It reads these variables at its first request.
    """
    os.environ.setdefault("TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS", _SILENT_SECONDS)
    os.environ.setdefault("TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES", "1")


def place_of_s3() -> dict[str, str]:
    """Return endpoint and region of S3 by the variables of AWS's own programs, which TensorStore does not read."""
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL", "")
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION", "")
    if endpoint and not region:
        region = "us-east-1"  # a service of one's own ignores it, and TensorStore would ask AWS
    found = {"endpoint": endpoint, "aws_region": region}
    return {key: value for key, value in found.items() if value}
