"""Makes the processes of a test compile few programs: narrow samplers, and few buckets.

JAX finds them by their lowered code, also in later runs. None is found by the code of the package, which changes.
"""

from orca_jax.exec import buckets
from orca_jax.helpers import bundled

bundled.code_digest = lambda: None

buckets._MIN_LARGEST_WIDTH = 8
buckets._FINE = buckets._COARSE = (4, 16, 64)
