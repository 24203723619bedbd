"""Makes the processes of a test compile few programs: narrow samplers, and few buckets."""

from orca_jax.exec import buckets

buckets._MIN_LARGEST_WIDTH = 8
buckets._FINE = buckets._COARSE = (4, 16, 64)
