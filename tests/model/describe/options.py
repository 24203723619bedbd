"""The least configurations of families: all other options have their defaults."""

from typing import Any

GPT2: dict[str, Any] = {"model_type": "gpt2"}
LLAMA: dict[str, Any] = {"model_type": "llama"}
QWEN2: dict[str, Any] = {"model_type": "qwen2"}
MIXTRAL: dict[str, Any] = {"model_type": "mixtral"}
QWEN2_MOE: dict[str, Any] = {"model_type": "qwen2_moe"}
QWEN3_MOE: dict[str, Any] = {"model_type": "qwen3_moe"}
GEMMA2: dict[str, Any] = {"model_type": "gemma2"}
GEMMA3: dict[str, Any] = {"model_type": "gemma3_text"}
