"""Iteration-level scheduling and selective batching for Transformer generation in JAX.

`LLM`, `AsyncLLM`, `Question` and `RequestOutput` are imported on first use, so that `import orca_jax` is fast and needs
no device.
"""

import signal
import sys
from typing import TYPE_CHECKING

if sys.argv[:1] == ["-m"] or (sys.argv[:1] and sys.argv[0].endswith("/orca-jax")):
    # The package is run as a program. Ctrl-C during its imports ends it without a traceback, until `run_program`.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from orca_jax.values.lora_request import LoRARequest
from orca_jax.values.request import SamplingParams

if TYPE_CHECKING:
    from orca_jax.llm import LLM
    from orca_jax.llm.async_llm import AsyncLLM
    from orca_jax.llm.outputs import RequestOutput
    from orca_jax.text.decisions.questions import Question

__all__ = ["LLM", "AsyncLLM", "LoRARequest", "Question", "RequestOutput", "SamplingParams"]


def __getattr__(name: str) -> object:
    if name == "LLM":
        from orca_jax.llm import LLM

        return LLM
    if name == "RequestOutput":
        from orca_jax.llm.outputs import RequestOutput

        return RequestOutput
    if name == "Question":
        from orca_jax.text.decisions.questions import Question

        return Question
    if name == "AsyncLLM":
        from orca_jax.llm.async_llm import AsyncLLM

        return AsyncLLM
    if name == "__version__":
        from importlib.metadata import version

        return version("orca-jax")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
