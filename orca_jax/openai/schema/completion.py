"""The request body of `POST /v1/completions`."""

from typing import Annotated, ClassVar

from msgspec import Meta

from orca_jax.openai.errors import ApiError
from orca_jax.openai.schema.limits import DEFAULT_MAX_TOKENS, MAX_ANSWERS, MAX_CHOICES, MAX_PROMPT_IDS, MAX_PROMPTS
from orca_jax.openai.schema.sampling import CompletionFields, NumLogprobs, TokenId, TokenLimit

PromptPart = str | list[int]
MaxIds = Meta(max_length=MAX_PROMPT_IDS)


class CompletionRequest(CompletionFields, frozen=True, kw_only=True):
    """A request for completions."""

    prompt: Annotated[
        str | Annotated[list[str | TokenId | Annotated[list[TokenId], MaxIds]], MaxIds],
        Meta(description=f"A string, a list of token ids, or a list of up to {MAX_PROMPTS} strings or lists of ids."),
    ]
    max_tokens: Annotated[
        TokenLimit | None,
        Meta(
            description="Maximum number of generated tokens; -1: the rest of the context. Default: the model's "
            "`generation_config.json`, else 16, and less if the context is too short. 0 only with `echo`."
        ),
    ] = None
    best_of: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None,
        Meta(
            description="Number of candidates for each prompt. The `n` candidates with the highest mean log "
            "probability are returned. Default `n`. Not with `stream`."
        ),
    ] = None
    echo: Annotated[bool | None, Meta(description="Put the prompt before the generated text.")] = None
    logprobs: Annotated[
        NumLogprobs | None,
        Meta(
            description="Return log probabilities of the generated tokens and of this many most probable ones; with "
            "`echo` also of the prompt's tokens."
        ),
    ] = None

    prompt_name: ClassVar[str] = "prompt"
    limit_name: ClassVar[str] = "max_tokens"
    default_limit: ClassVar[int | None] = DEFAULT_MAX_TOKENS

    @property
    def limit(self) -> int | None:
        """Maximum number of generated tokens; None: the default."""
        return self.max_tokens

    def prompts(self) -> list[PromptPart]:
        """The prompts, in order. Raises ApiError."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and all(isinstance(part, int) for part in self.prompt):
            return [[part for part in self.prompt if isinstance(part, int)]]
        if not 1 <= len(self.prompt) <= MAX_PROMPTS:
            raise ApiError(400, f"prompt must contain 1 to {MAX_PROMPTS} prompts, got {len(self.prompt)}", "prompt")
        prompts = [part for part in self.prompt if not isinstance(part, int)]
        if len(prompts) < len(self.prompt) or len({type(part) for part in prompts}) > 1:
            raise ApiError(
                400,
                "prompt must be a string, a list of token ids, a list of strings, or a list of lists of token ids",
                "prompt",
            )
        return prompts

    def candidates(self, num_prompts: int) -> int:
        """Number of engine requests for each prompt. Raises ApiError."""
        n = self.n or 1
        candidates = self.best_of or n
        if candidates < n:
            raise ApiError(400, f"best_of must be at least n, which is {n}", "best_of")
        if candidates > n and self.stream:
            raise ApiError(400, "best_of cannot be streamed: the best texts are known only at the end", "best_of")
        if candidates * num_prompts > MAX_ANSWERS:
            message = (
                f"{num_prompts} prompts with {candidates} candidates each exceed the limit of {MAX_ANSWERS} in one call"
            )
            raise ApiError(400, message, "best_of" if self.best_of else "n")
        return candidates
