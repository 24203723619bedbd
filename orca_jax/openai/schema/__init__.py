"""What the API takes and gives, as tables of fields: they drive validation, `/openapi.json` and docs/api.md."""

from orca_jax.openai.schema.chat import ChatRequest
from orca_jax.openai.schema.completion import CompletionRequest
from orca_jax.openai.schema.neutral import CHAT, COMPLETION, NOTHING, TOKENIZE
from orca_jax.openai.schema.parse import Parser
from orca_jax.openai.schema.tokens import DetokenizeRequest, TokenizeRequest

completion_parser = Parser(CompletionRequest, COMPLETION)
chat_parser = Parser(ChatRequest, CHAT)
tokenize_parser = Parser(TokenizeRequest, TOKENIZE)
detokenize_parser = Parser(DetokenizeRequest, NOTHING)
PARSERS = (completion_parser, chat_parser, tokenize_parser, detokenize_parser)
