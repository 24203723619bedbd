"""The list of models in Anthropic's format."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Literal

import msgspec

from orca_jax.serve.openai.schema.answers import ModelCard


class MessagesModel(msgspec.Struct, frozen=True, tag_field="type", tag="model"):
    """One served model."""

    id: str
    display_name: str
    created_at: str
    max_input_tokens: int
    max_tokens: int
    lifecycle: Literal["active"] = "active"


class MessagesModelList(msgspec.Struct, frozen=True):
    """The answer of `GET /v1/models` for a client of Anthropic: a page with all models."""

    data: list[MessagesModel]
    first_id: str
    last_id: str
    has_more: bool = False


def messages_model(card: ModelCard) -> MessagesModel:
    """A model in Anthropic's format."""
    created = datetime.fromtimestamp(card.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return MessagesModel(card.id, card.id, created, card.max_model_len, card.max_model_len)


def messages_models(cards: Sequence[ModelCard]) -> MessagesModelList:
    """All models in Anthropic's format."""
    models = [messages_model(card) for card in cards]
    return MessagesModelList(models, models[0].id, models[-1].id)
