"""Progress bars of downloads."""

import sys
from typing import Any

from tqdm import tqdm

from orca_jax.helpers.console import LastingStream


class HiddenBar(tqdm):
    """A progress bar of the library that is not drawn."""

    is_shown = False

    def __init__(self, *args: Any, **options: Any) -> None:
        options.pop("name", None)  # of the library's own bars
        if sys.stderr is not None:
            options["file"] = LastingStream(sys.stderr)
        is_hidden = not self.is_shown or options.get("unit") != "B"  # bytes, not files
        super().__init__(*args, **{**options, "disable": is_hidden, "leave": False})


class ShownBar(HiddenBar):
    """A progress bar of the library. It is drawn if it counts bytes, and disappears at the end."""

    is_shown = True
