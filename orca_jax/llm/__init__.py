"""The engine in this process, for scripts and notebooks: `offline.LLM`, and its open requests."""

from orca_jax.llm.offline import LLM

__all__ = ["LLM"]
