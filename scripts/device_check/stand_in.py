"""jaxtyping's names without jaxtyping: here shapes are comments."""

import sys
import types
from typing import Any


class _Anything:
    """`Float[Array, "T H D"]` is any array."""

    def __class_getitem__(cls, item: object) -> Any:
        return Any


def stand_in_for_jaxtyping() -> None:
    """Let `from jaxtyping import ...` find names that mean nothing."""
    module: Any = types.ModuleType("jaxtyping")
    for name in ("Bool", "Float", "Float32", "Int", "Int32", "Key", "Num", "Shaped", "UInt", "UInt32"):
        setattr(module, name, _Anything)
    module.Array = Any
    module.jaxtyped = lambda *_, **__: lambda function: function
    sys.modules["jaxtyping"] = module
