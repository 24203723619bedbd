"""Models of the Hugging Face Hub: names, downloads, and checks of a server's answers. Names of buckets, too."""

from orca_jax.helpers.hub.models import (
    BUCKET_DRIVERS,
    INDEX,
    SETTINGS,
    SINGLE,
    HubModel,
    download,
    is_bucket,
    is_hub_name,
)

__all__ = [
    "BUCKET_DRIVERS",
    "INDEX",
    "SETTINGS",
    "SINGLE",
    "HubModel",
    "download",
    "is_bucket",
    "is_hub_name",
]
