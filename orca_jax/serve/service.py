"""What the handlers share: the engine's client, the tokenizer, the model's names and limits."""

import asyncio
import time
from collections.abc import Sequence

from orca_jax.errors import EngineDeadError, RequestError
from orca_jax.request import SamplingParams
from orca_jax.serve.api_error import ApiError, engine_gone
from orca_jax.serve.engine_client import EngineClient, Mailbox
from orca_jax.serve.schema import DEFAULT_MAX_TOKENS, CompletionRequest, Prompt
from orca_jax.serve.wire import Ready
from orca_jax.text.tokenizer import Tokenizer, load_tokenizer

LONG_TEXT = 4096  # characters: what takes longer to tokenize does so in a thread


class Service:
    """Prepares requests for the engine. Usable for completions once `set_ready` was called."""

    def __init__(self, client: EngineClient, names: Sequence[str]) -> None:
        self.client = client
        self.names = tuple(names)  # the first one is used in answers
        self.started = int(time.time())
        self._ready: Ready | None = None
        self._tokenizer: Tokenizer | None = None

    async def set_ready(self, ready: Ready) -> None:
        """Take in what the engine said of its model, and load the same tokenizer. Raises ConfigError."""
        self._tokenizer = await asyncio.to_thread(load_tokenizer, ready.tokenizer)
        self._ready = ready

    @property
    def is_ready(self) -> bool:
        """Whether completions are answered now."""
        return self._ready is not None and self.client.state == "ready"

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises ApiError while it is loading."""
        self._limits()
        assert self._tokenizer is not None
        return self._tokenizer

    @property
    def max_model_len(self) -> int:
        """Prompt and generated tokens of one request. Raises ApiError while the model is loading."""
        return self._limits().max_model_len

    def check_model(self, model: str) -> None:
        """Raises ApiError if no such model is served."""
        if model not in self.names:
            raise ApiError(404, f"the model {model!r} does not exist", "model", code="model_not_found")

    async def prepare(self, call: CompletionRequest) -> list[tuple[list[int], SamplingParams]]:
        """Ids and parameters for every prompt, checked so that the engine takes all of them.

        Raises:
            ApiError: one of them is wrong, and none was submitted.
        """
        limits = self._limits()
        self._check_stop_ids(call.stop_token_ids or (), limits.vocab_size)
        prepared = []
        try:
            for prompt in call.prompts():
                ids = await self._encode(prompt)
                prepared.append((ids, call.sampling(self._check_length(ids, call.max_tokens, limits))))
        except RequestError as error:
            raise ApiError(400, error.message, error.param) from None
        return prepared

    def open(self, requests: Sequence[tuple[list[int], SamplingParams]]) -> Mailbox:
        """Submit prepared requests. Raises ApiError when the engine has gone meanwhile."""
        try:
            return self.client.open(requests)
        except EngineDeadError as error:
            raise engine_gone(str(error)) from None

    async def _encode(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str):
            ids = prompt
        elif len(prompt) < LONG_TEXT:
            ids = self.tokenizer.encode(prompt)
        else:
            ids = await asyncio.to_thread(self.tokenizer.encode, prompt)
        vocab_size = self._limits().vocab_size
        if not ids:
            raise ApiError(400, "prompt must hold at least one token", "prompt")
        if min(ids) < 0 or max(ids) >= vocab_size:
            wrong = next(i for i in ids if not 0 <= i < vocab_size)
            raise ApiError(400, f"prompt holds id {wrong}, and the model's vocabulary has {vocab_size} ids", "prompt")
        return ids

    def _check_length(self, ids: Sequence[int], asked: int | None, limits: Ready) -> int:
        """The request's `max_tokens`. Only a default gives way to a short context."""
        room = min(limits.max_model_len, limits.n_slots) - len(ids)
        if room < 1:
            message = (
                f"this model's maximum context length is {room + len(ids)} tokens, and the prompt has {len(ids)}; "
                "at least one has to be left for the answer"
            )
            raise ApiError(400, message, "prompt", code="context_length_exceeded")
        if asked is None:
            return min(DEFAULT_MAX_TOKENS, room)
        if asked > room:
            message = (
                f"this model's maximum context length is {room + len(ids)} tokens, and you asked for "
                f"{len(ids) + asked}: {len(ids)} in the prompt, {asked} as max_tokens"
            )
            raise ApiError(400, message, "max_tokens", code="context_length_exceeded")
        return asked

    @staticmethod
    def _check_stop_ids(ids: Sequence[int], vocab_size: int) -> None:
        for token_id in ids:
            if not 0 <= token_id < vocab_size:
                message = f"stop_token_ids holds {token_id}, and the model's vocabulary has {vocab_size} ids"
                raise ApiError(400, message, "stop_token_ids")

    def _limits(self) -> Ready:
        if self._ready is None:
            raise engine_gone("the model is still loading")
        return self._ready
