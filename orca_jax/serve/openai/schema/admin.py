"""The bodies of calls that change adapters, with the names of vLLM, and weights, with those of SGLang."""

from typing import Annotated

import msgspec
from msgspec import Meta

from orca_jax.serve.openai.schema.parse import BodyParser
from orca_jax.serve.openai.schema.unused import ADAPTER, UnusedField

MAX_VERSION = 2**63 - 1
_ALWAYS = UnusedField("the prefix cache is always emptied", (True,))


class LoadAdapterRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of `POST /v1/load_lora_adapter`."""

    lora_name: str
    lora_path: str


class UnloadAdapterRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of `POST /v1/unload_lora_adapter`."""

    lora_name: str


class UpdateWeightsRequest(msgspec.Struct, frozen=True, kw_only=True):
    """New weights for the served model."""

    model_path: Annotated[
        str,
        Meta(
            min_length=1,
            description="Folder of an Orbax checkpoint, below the folder of `--weights-root`.",
        ),
    ]
    weight_version: Annotated[
        Annotated[int, Meta(ge=0, le=MAX_VERSION)] | None,
        Meta(
            description="Number of the new weights. Default: the next one; weights at the start have 0."
        ),
    ] = None
    abort_all_requests: Annotated[
        bool | None,
        Meta(
            description="Abort open requests, instead of waiting for their end with the old weights."
        ),
    ] = None


class UpdatedWeights(msgspec.Struct, frozen=True, kw_only=True):
    """The result of an update."""

    success: bool
    message: str
    weight_version: int


update_weights_parser = BodyParser(UpdateWeightsRequest, {"flush_cache": _ALWAYS})
load_parser = BodyParser(LoadAdapterRequest, ADAPTER)
unload_parser = BodyParser(UnloadAdapterRequest, ADAPTER)
