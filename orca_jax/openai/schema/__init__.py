"""Request and response bodies of the API as tables of fields: for validation, `/openapi.json` and docs/api.md."""

from orca_jax.openai.schema.chat import ChatRequest
from orca_jax.openai.schema.completion import CompletionRequest
from orca_jax.openai.schema.embeddings import EmbeddingRequest
from orca_jax.openai.schema.messages import MessagesRequest
from orca_jax.openai.schema.messages import settle as settle_messages
from orca_jax.openai.schema.parse import BodyParser
from orca_jax.openai.schema.responses import ResponsesRequest
from orca_jax.openai.schema.responses import settle as settle_responses
from orca_jax.openai.schema.tokens import DetokenizeRequest, TokenizeRequest
from orca_jax.openai.schema.unused import CHAT, COMPLETION, EMBEDDING, MESSAGES, NOTHING, RESPONSES, TOKENIZE

completion_parser = BodyParser(CompletionRequest, COMPLETION)
chat_parser = BodyParser(ChatRequest, CHAT)
tokenize_parser = BodyParser(TokenizeRequest, TOKENIZE)
detokenize_parser = BodyParser(DetokenizeRequest, NOTHING)
messages_parser = BodyParser(MessagesRequest, MESSAGES, settle_messages)
embedding_parser = BodyParser(EmbeddingRequest, EMBEDDING)
responses_parser = BodyParser(ResponsesRequest, RESPONSES, settle_responses)
PARSERS = (
    *(completion_parser, chat_parser, responses_parser, messages_parser),
    *(embedding_parser, tokenize_parser, detokenize_parser),
)
