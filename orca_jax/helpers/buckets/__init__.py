"""Models in buckets and on web servers: names, folders with their small files, and objects read by range."""

from orca_jax.helpers.buckets.names import BucketName, is_bucket
from orca_jax.helpers.buckets.views import BucketView, located, shown, view_of

__all__ = ["BucketName", "BucketView", "is_bucket", "located", "shown", "view_of"]
