"""Stand-ins for jaxtyping's names, without checks of shapes."""

import sys
import types
from typing import Any


class _Anything:
    """Any array, for every subscript such as `Float[Array, "T H D"]`."""

    def __class_getitem__(cls, item: object) -> Any:
        return Any


def stand_in_for_jaxtyping() -> None:
    """Make `from jaxtyping import ...` find stand-ins."""
    module: Any = types.ModuleType("jaxtyping")
    for name in (
        "Bool",
        "Float",
        "Float32",
        "Int",
        "Int32",
        "Key",
        "Num",
        "Shaped",
        "UInt",
        "UInt32",
    ):
        setattr(module, name, _Anything)
    module.Array = Any
    module.jaxtyped = lambda *_, **__: lambda function: function
    sys.modules["jaxtyping"] = module
