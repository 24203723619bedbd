"""The fields of the calls that load and unload adapters, with vLLM's names."""

import msgspec

from orca_jax.openai.schema.parse import BodyParser
from orca_jax.openai.schema.unused import ADAPTER


class LoadAdapterRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of `POST /v1/load_lora_adapter`."""

    lora_name: str
    lora_path: str


class UnloadAdapterRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of `POST /v1/unload_lora_adapter`."""

    lora_name: str


load_parser = BodyParser(LoadAdapterRequest, ADAPTER)
unload_parser = BodyParser(UnloadAdapterRequest, ADAPTER)
