"""Names of an Orbax checkpoint: of its files, of the folders that may hold its tree, and of files beside it."""

PARAMS = "params"
"""The folder of a model directory that holds the Orbax checkpoint."""
METADATA = "_METADATA"
CHECKPOINT_METADATA = "_CHECKPOINT_METADATA"
COMMITTED = "commit_success.txt"
MANIFEST = "manifest.ocdbt"
MARKS = (METADATA, CHECKPOINT_METADATA, COMMITTED)
"""Files of a checkpoint: it has at least one."""

WRAPPERS = ("params", "state", "default", "model", "pytree")
"""Usual names of the tree of parameters, best first."""
TREE_FOLDERS = (*WRAPPERS, "items", "model_params")
"""Folders with the tree: also those of MaxText and Tunix."""

MAPPING = "mapping.json"
DIGESTS = f"{PARAMS}.sha256"
