"""Request and response bodies of the API as tables of fields: for validation, `/openapi.json` and docs/api.md."""

from collections.abc import Mapping
from typing import Any

from orca_jax.serve.openai.schema.chat import ChatRequest
from orca_jax.serve.openai.schema.decisions.bodies import DecisionRequest, SystemRequest
from orca_jax.serve.openai.schema.decisions.neighbours import (
    ClassifyRequest,
    RerankRequest,
    ScoreRequest,
)
from orca_jax.serve.openai.schema.embeddings import EmbeddingRequest
from orca_jax.serve.openai.schema.messages import MessagesRequest
from orca_jax.serve.openai.schema.messages import settle as settle_messages
from orca_jax.serve.openai.schema.parse import BodyParser
from orca_jax.serve.openai.schema.responses import ResponsesRequest
from orca_jax.serve.openai.schema.responses import settle as settle_responses
from orca_jax.serve.openai.schema.sampling import CompletionRequest
from orca_jax.serve.openai.schema.tokens import DetokenizeRequest, TokenizeRequest
from orca_jax.serve.openai.schema.unused import (
    CALLS,
    CHAT,
    COMPLETION,
    DECISION,
    EMBEDDING,
    MESSAGES,
    NOTHING,
    RERANK,
    RESPONSES,
    SYSTEM,
    TOKENIZE,
)

completion_parser = BodyParser(CompletionRequest, COMPLETION)
chat_parser = BodyParser(ChatRequest, CHAT)
tokenize_parser = BodyParser(TokenizeRequest, TOKENIZE)
detokenize_parser = BodyParser(DetokenizeRequest, NOTHING)
messages_parser = BodyParser(MessagesRequest, MESSAGES, settle_messages)
embedding_parser = BodyParser(EmbeddingRequest, EMBEDDING)
decision_parser = BodyParser(DecisionRequest, DECISION)
system_parser = BodyParser(SystemRequest, SYSTEM)
rerank_parser = BodyParser(RerankRequest, RERANK)
classify_parser = BodyParser(ClassifyRequest, CALLS)
score_parser = BodyParser(ScoreRequest, CALLS)
responses_parser = BodyParser(ResponsesRequest, RESPONSES, settle_responses)
PARSERS: Mapping[str, BodyParser[Any]] = {
    "POST /v1/completions": completion_parser,
    "POST /v1/chat/completions": chat_parser,
    "POST /v1/messages": messages_parser,
    "POST /v1/responses": responses_parser,
    "POST /v1/embeddings": embedding_parser,
    "POST /v1/decisions": decision_parser,
    "POST /v1/systemone": system_parser,
    "POST /v1/rerank": rerank_parser,
    "POST /classify": classify_parser,
    "POST /v1/score": score_parser,
    "POST /generative_scoring": score_parser,
    "POST /tokenize": tokenize_parser,
    "POST /detokenize": detokenize_parser,
}
"""By the route that answers the body; routes that only count or show its tokens take the same body."""
