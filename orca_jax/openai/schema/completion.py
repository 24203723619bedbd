"""`POST /v1/completions`: what comes in."""

from typing import Annotated, ClassVar

from msgspec import Meta

from orca_jax.openai.errors import ApiError
from orca_jax.openai.schema.limits import DEFAULT_MAX_TOKENS, MAX_ANSWERS, MAX_CHOICES, MAX_PROMPT_IDS, MAX_PROMPTS
from orca_jax.openai.schema.sampling import AnyTokenCount, NumLogprobs, SamplingFields, TokenId

PromptPart = str | list[int]
MaxIds = Meta(max_length=MAX_PROMPT_IDS)


class CompletionRequest(SamplingFields, frozen=True, kw_only=True):
    """A call for completions."""

    prompt: Annotated[
        str | Annotated[list[str | TokenId | Annotated[list[TokenId], MaxIds]], MaxIds],
        Meta(description=f"A string, a list of ids, or up to {MAX_PROMPTS} of either kind."),
    ]
    max_tokens: Annotated[
        AnyTokenCount | None,
        Meta(
            description="Generated tokens at most. Default 16, or the model directory's, or less where the context "
            "leaves less; 0 only with `echo`."
        ),
    ] = None
    best_of: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None,
        Meta(
            description="Candidates for each prompt, of which the `n` with the highest mean log probability are "
            "the answer. Not with `stream`."
        ),
    ] = None
    echo: Annotated[bool | None, Meta(description="Begin the text with the prompt.")] = None
    logprobs: Annotated[
        NumLogprobs | None,
        Meta(
            description="Log probabilities of the text's tokens, and of so many most probable ones; with `echo` of the "
            "prompt's tokens too."
        ),
    ] = None

    prompt_name: ClassVar[str] = "prompt"
    limit_name: ClassVar[str] = "max_tokens"
    default_limit: ClassVar[int | None] = DEFAULT_MAX_TOKENS

    @property
    def limit(self) -> int | None:
        """Generated tokens at most."""
        return self.max_tokens

    def prompts(self) -> list[PromptPart]:
        """The prompts, in order. Raises ApiError."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and all(isinstance(part, int) for part in self.prompt):
            return [[part for part in self.prompt if isinstance(part, int)]]
        if not 1 <= len(self.prompt) <= MAX_PROMPTS:
            raise ApiError(400, f"prompt must hold 1 to {MAX_PROMPTS} prompts, got {len(self.prompt)}", "prompt")
        prompts = [part for part in self.prompt if not isinstance(part, int)]
        if len(prompts) < len(self.prompt) or len({type(part) for part in prompts}) > 1:
            raise ApiError(400, "prompt must be a string, token ids, or a list of one kind of these", "prompt")
        return prompts

    def candidates(self, num_prompts: int) -> int:
        """Engine requests for each prompt. Raises ApiError."""
        n = self.n or 1
        candidates = self.best_of or n
        if candidates < n:
            raise ApiError(400, f"best_of must be at least n, which is {n}", "best_of")
        if candidates > n and self.stream:
            raise ApiError(400, "best_of cannot be streamed: which texts are best is known at the end", "best_of")
        if candidates * num_prompts > MAX_ANSWERS:
            message = f"{num_prompts} prompts with {candidates} candidates each exceed {MAX_ANSWERS} in one call"
            raise ApiError(400, message, "best_of" if self.best_of else "n")
        return candidates
