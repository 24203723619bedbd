"""The served model: the client of the engine, the tokenizer, the chat template, and the names and limits."""

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import UNSET, UnsetType

from orca_jax.helpers.bundled import directory_of, pinned, texts_of
from orca_jax.link.client import EngineClient
from orca_jax.link.errors import LinkError
from orca_jax.link.wire import Ready
from orca_jax.serve.openai.errors import ApiError, PromptTooLong, api_error, engine_gone
from orca_jax.serve.openai.explain import SeenPrompts
from orca_jax.serve.openai.schema.answers import DecisionLabels
from orca_jax.serve.openai.work import FrontEndWork
from orca_jax.serve.telemetry.observer import ServerObserver
from orca_jax.server_config import ServerConfig
from orca_jax.text.calls.dialects import BY_NAME, HARMONY, Dialect, inferred_dialect
from orca_jax.text.decisions.calibration import load_calibration
from orca_jax.text.decisions.labels import LabelFinder
from orca_jax.text.decisions.prompts import VARIABLES, marked
from orca_jax.text.decisions.reads import FitsByKind
from orca_jax.text.generation_config import read_generation_defaults
from orca_jax.text.reasoning import MESSAGES, ThinkTags, tags_of
from orca_jax.text.template import ChatTemplate, RenderedTooLong, load_chat_template
from orca_jax.text.template_trials import ALL_SHOWN, Shown, keeps_late_system, shown_by
from orca_jax.text.template_worker import MAX_OUTPUT
from orca_jax.text.tokenizer import Tokenizer, load_tokenizer
from orca_jax.text.work_threads import ENCODING, TEMPLATES
from orca_jax.values.cache_spec import ceil_div
from orca_jax.values.errors import ConfigError, RequestError

logger = logging.getLogger(__name__)

# characters; longer texts are encoded in a thread, and all texts if their time is not bounded
LONG_TEXT = 4096


@dataclass(frozen=True, slots=True)
class Model:
    """Properties of the model, known once the engine serves."""

    tokenizer: Tokenizer
    template: ChatTemplate | None
    defaults: Mapping[str, float | int]  # by field of `SamplingParams`
    vocab_size: int
    max_model_len: int
    max_characters: int  # of a text; any longer text has more tokens than the context
    # tokens of prompt and answer together: at most `max_model_len`, less if the KV cache is smaller
    context: int
    dimensions: tuple[int, ...] | None = None  # of shortened embeddings: () for any, None for none
    # of the tool calls that the model makes by itself; None if it is not known
    dialect: Dialect | None = None
    # the chat template renders system messages after other messages
    keeps_late_system: bool = False
    shown: Shown = ALL_SHOWN  # by the chat template
    # variables of the chat template for all requests
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    # around the reasoning of the model; None if they are not known
    think_tags: ThinkTags | None = None
    # of single tokens; unset if the chat template has no place for questions
    decision_labels: DecisionLabels | UnsetType = UNSET
    # id of each special token by its text
    specials: Mapping[str, int] = field(default_factory=dict)

    @property
    def has_short_call_ids(self) -> bool:
        """True if the chat template takes only ids of calls with nine letters and digits."""
        return self.dialect is not None and self.dialect.has_short_ids


class ModelTexts(NamedTuple):
    """What the files of the model have for the front end."""

    source: str  # the directory, or the GGUF file
    defaults: Mapping[str, float | int]
    template: ChatTemplate | None
    tokenizer: Tokenizer | None = None  # None if it is not read yet

    def close(self) -> None:
        """Stop the processes of the chat template."""
        if self.template is not None:
            self.template.close()


class AdapterPlace(NamedTuple):
    """The directory of a loaded adapter, and the time of its loading in seconds since 1970."""

    path: str
    created: int


class Service:
    """The state shared by all handlers. Completions are possible after `set_ready`.

    Raises:
        ConfigError: the calibration cannot be read.
    """

    def __init__(
        self, client: EngineClient, config: ServerConfig, observer: ServerObserver
    ) -> None:
        self.client = client
        self.config = config
        self.observer = observer
        self.names = config.names  # answers contain the first one
        self.started = int(time.time())
        self.adapters: dict[str, AdapterPlace] = {}  # by name
        self._model: Model | None = None
        self._texts: asyncio.Task[ModelTexts] | None = None
        self._ready: Ready | None = None
        self.work = FrontEndWork()
        # each API key has its own prefix cache; the reader of the keys sets it
        self.salts_keys = False
        # what the prompts of calls share with earlier ones; None without explanations
        self.seen: SeenPrompts | None = None
        if config.explain_cache:
            self.seen = SeenPrompts()
        self._warnings: set[str] = set()
        self.calibration: FitsByKind | None = None  # of decisions
        if config.calibration is not None:
            self.calibration = load_calibration(config.calibration)
        self._labels: dict[str, LabelFinder] = {}  # by the end of the prompts of decisions

    async def read_texts(self) -> None:
        """Read the files of `set_ready` before it, so that their errors come early. Raises ConfigError."""
        reading = asyncio.create_task(
            asyncio.to_thread(_read_texts, self.config, with_tokenizer=True)
        )
        self._texts = reading  # until `set_ready` has used it, which may be before this call ends
        try:
            await asyncio.shield(reading)
        finally:
            # also if this call is cancelled: `close` needs what the thread has made
            await asyncio.wait([reading])

    async def set_ready(self, ready: Ready) -> None:
        """Load tokenizer, chat template and defaults of the engine's model. Raises ConfigError."""
        self._take_adapters(ready)
        if ready == self._ready:
            return  # the same model in a new process
        self._close_model()
        texts = (
            ModelTexts("", {}, None) if self._texts is None else await asyncio.shield(self._texts)
        )
        self._model = await asyncio.to_thread(_load, ready, self.config, texts)
        self._texts = None  # not before: `close` stops what is not used yet
        self._ready = ready

    def _close_model(self) -> None:
        if self._model is not None and self._model.template is not None:
            self._model.template.close()

    def close(self) -> None:
        """Stop the processes of the chat template."""
        self._close_model()
        reading = self._texts
        if (
            reading is not None
            and reading.done()
            and not reading.cancelled()
            and reading.exception() is None
        ):
            reading.result().close()

    @property
    def is_ready(self) -> bool:
        """True if completions are answered now."""
        return self._model is not None and self.client.state == "ready"

    @property
    def model(self) -> Model:
        """The model. Raises ApiError while it is loading."""
        if self._model is None:
            raise engine_gone("the model is still loading")
        return self._model

    def warn_once(self, message: str) -> None:
        """Log a message, unless it was logged before."""
        if message not in self._warnings:
            self._warnings.add(message)
            logger.warning("%s", message)

    def check_model(self, name: str | None) -> None:
        """Raise ApiError if no model or adapter of this name is served. None stands for the served model."""
        if name is not None and name not in self.names and name not in self.adapters:
            lost = self.client.adapters.lost.get(name)
            served = ", ".join(map(repr, [*self.names, *self.adapters]))
            message = f"the adapter {name[:100]!r} is lost: {lost}"
            if lost is None:
                message = (
                    f"the model {name[:100]!r} does not exist; --served-model-name gives the model further names; "
                    f"this server has {served}"
                )
            raise ApiError(404, message, "model", code="model_not_found")

    def adapter_of(self, name: str | None) -> str | None:
        """The adapter that calls for this model need; None for the model itself."""
        return name if name in self.adapters and name not in self.names else None

    def answering(self, name: str | None) -> str:
        """The name in answers to calls for this model: the adapter's, or the first of the model itself."""
        return self.adapter_of(name) or self.names[0]

    async def load_adapter(self, name: str, path: str) -> str:
        """Load an adapter into the engine. Returns a note about it, or an empty text. Raises ApiError."""
        if name in self.names:
            raise ApiError(
                400, f"lora_name {name!r} is the name of the model; choose another one", "lora_name"
            )
        note = await self._change(self.client.adapters.load(name, path))
        self.adapters[name] = AdapterPlace(path, int(time.time()))
        return note

    async def unload_adapter(self, name: str) -> None:
        """Refuse an adapter to new calls. Raises ApiError."""
        if name not in self.adapters:
            raise ApiError(
                404, f"the adapter {name!r} is not loaded", "lora_name", code="model_not_found"
            )
        await self._change(self.client.adapters.unload(name))
        self.adapters.pop(name, None)

    async def _change[T](self, change: Awaitable[T]) -> T:
        try:
            return await change
        except RequestError as error:
            raise ApiError(400, error.message, error.param) from None
        except LinkError as error:
            raise api_error(error, self.config.overload_status) from None

    def _take_adapters(self, ready: Ready) -> None:
        """Take the adapters of a new engine: those of the settings, and those that calls have loaded."""
        paths = self.config.engine.lora_paths | self.client.adapters.loaded
        names = (*ready.adapters, *self.client.adapters.loaded)
        now = int(time.time())
        self.adapters = {
            name: self.adapters.get(name, AdapterPlace(paths[name], now)) for name in names
        }

    def labels_at(self, tail: str) -> LabelFinder:
        """The labels of decisions after prompts that end so. Any thread may call it."""
        found = self._labels.get(tail)
        if found is None:
            found = LabelFinder(self.model.tokenizer, tail)
            # variables of a call may change the end: only the newest is kept
            self._labels = {tail: found}
        return found

    async def encode(self, text: str, param: str, add_special_tokens: bool) -> list[int]:
        """The token ids of a text. Raises ApiError naming `param`."""
        (ids,) = await self.encode_all([text], param, add_special_tokens)
        return ids

    async def encode_all(
        self, texts: Sequence[str], param: str, add_special_tokens: bool
    ) -> list[list[int]]:
        """The token ids of several texts, without blocking the event loop. Raises ApiError naming `param`."""
        tokenizer = self.model.tokenizer
        limit = self.model.max_characters
        longest = max(map(len, texts), default=0)
        if longest > limit:  # tokenizing it could take minutes
            message = (
                f"{param} has {longest} characters; the context of this model holds at most {limit}"
            )
            raise self._too_long(message, param, longest)

        def encode() -> list[list[int]]:
            return [tokenizer.encode(text, add_special_tokens) for text in texts]

        return await self.encoding(encode, param, sum(map(len, texts)))

    def _too_long(self, message: str, param: str, characters: int) -> PromptTooLong:
        """The error for a prompt of at least so many characters, whose tokens are not counted."""
        model = self.model
        least = max(model.context, ceil_div(characters, model.tokenizer.longest_token))
        return PromptTooLong(
            message,
            param,
            least,
            model.context - 1,
            f" (a lower bound for {characters} characters)",
        )

    async def encoding[T](self, work: Callable[[], T], param: str, num_characters: int) -> T:
        """The result of `work` on a text, without blocking the event loop. Raises ApiError naming `param`.

        A text on which the tokenizer fails or takes too long fails its own call only.
        """
        if num_characters >= LONG_TEXT or (num_characters and not self.model.tokenizer.is_bounded):
            return await self.work.run_work(ENCODING, work, param)
        try:
            return work()
        except RequestError as error:
            raise ApiError(400, error.message, param) from None

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        kwargs: Mapping[str, Any] | None,
    ) -> str:
        """The prompt of a conversation, from the chat template. Raises ApiError."""
        template = self.model.template
        if template is None:
            message = "this model has no chat template: start the server with --chat-template, or use /v1/completions"
            raise ApiError(400, message, "messages", code="no_chat_template")

        def rendered() -> str:
            try:
                if sum([len(one["content"] or "") for one in messages]) > MAX_OUTPUT:
                    # larger ones could exceed the memory of the template's process
                    raise RenderedTooLong(MAX_OUTPUT)
                return template.render(
                    messages,
                    tools=tools,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    kwargs={**self.model.template_kwargs, **(kwargs or {})},
                    max_continued=self.model.max_characters,
                )
            except RenderedTooLong as error:
                raise self._too_long(error.message, "messages", error.most) from None

        return await self.work.run_work(TEMPLATES, rendered)


def downloaded(config: ServerConfig) -> ServerConfig:
    """The settings with the commit of a model of the Hub, after its download. Raises ConfigError."""
    return replace(config, engine=pinned(config.engine))


def check_texts(config: ServerConfig) -> None:
    """Check the files that `set_ready` will read, before a long compilation. Raises ConfigError."""
    _read_texts(config).close()


def _read_texts(config: ServerConfig, *, with_tokenizer: bool = False) -> ModelTexts:
    engine = config.engine
    tokenizer = None
    texts = _texts_from(texts_of(engine), config)
    source = engine.tokenizer or directory_of(engine)
    if with_tokenizer and source:
        with contextlib.suppress(ConfigError):  # the engine has the same error
            tokenizer = load_tokenizer(source)
            _ = tokenizer.longest_token  # cached
    return texts._replace(tokenizer=tokenizer)


def _texts_from(source: str, config: ServerConfig) -> ModelTexts:
    defaults = read_generation_defaults(
        source, config.generation_config, config.generation_overrides
    )
    return ModelTexts(source, defaults, load_chat_template(source, config.chat_template))


def _load(ready: Ready, config: ServerConfig, texts: ModelTexts) -> Model:
    if texts.source != ready.source or not texts.source:
        texts.close()
        texts = _texts_from(ready.source, config)._replace(tokenizer=texts.tokenizer)
    template = texts.template
    tokenizer = texts.tokenizer
    if tokenizer is None or tokenizer.source != ready.tokenizer:
        tokenizer = load_tokenizer(ready.tokenizer)
    return Model(
        tokenizer=tokenizer,
        template=template,
        defaults=texts.defaults,
        template_kwargs=config.template_kwargs,
        vocab_size=ready.vocab_size,
        max_model_len=ready.max_model_len,
        max_characters=min(ready.max_model_len, ready.n_slots) * tokenizer.longest_token,
        context=min(ready.max_model_len, ready.n_slots),
        dialect=_dialect(template, config),
        keeps_late_system=template is not None and keeps_late_system(template),
        shown=ALL_SHOWN if template is None else shown_by(template),
        think_tags=_think_tags(template, config),
        specials={
            tokenizer.decode([i], skip_special_tokens=False): i for i in tokenizer.special_ids
        },
        dimensions=_dimensions(ready.source),
        decision_labels=_decision_labels(template, tokenizer),
    )


def _decision_labels(
    template: ChatTemplate | None, tokenizer: Tokenizer
) -> DecisionLabels | UnsetType:
    """The most single labels after the prompts of decisions, found by a trial."""
    if template is None:
        return UNSET
    trial = marked("state")
    try:
        rendered = template.render(trial.messages, kwargs=VARIABLES)
        labels = LabelFinder(tokenizer, trial.frame(rendered, template.tool_source).tail)
    except RequestError as error:
        logger.info("decisions are refused: %s", error.message)
        return UNSET
    return DecisionLabels(*[labels.most_single(name) for name in ("words", "letters", "digits")])


def _dimensions(directory: str) -> tuple[int, ...] | None:
    """The dimensions of shortened embeddings, by the keys of config.json that vLLM reads too."""
    path = Path(directory, "config.json")
    if not directory or not path.is_file():
        return None
    values = json.loads(path.read_text(encoding="utf-8"))  # the engine has read it, so it is valid
    sizes = values.get("matryoshka_dimensions")
    if isinstance(sizes, list) and all(type(size) is int for size in sizes):
        return tuple(sizes)
    return () if values.get("is_matryoshka") is True else None


def _think_tags(template: ChatTemplate | None, config: ServerConfig) -> ThinkTags | None:
    found = None if template is None else tags_of(config.reasoning_parser, template.tool_source)
    if found is not None and config.reasoning_parser is None:
        logger.info(
            "text between %s and %s is reasoning, by the chat template; see --reasoning-parser",
            *found,
        )
    return found


def _dialect(template: ChatTemplate | None, config: ServerConfig) -> Dialect | None:
    name = config.tool_call_parser
    if config.reasoning_parser == MESSAGES:
        return HARMONY
    if name is not None:
        return BY_NAME[name]
    if template is None:
        return None
    found = inferred_dialect(template.tool_source)
    if found is not None:
        logger.info(
            "tool calls are read as %s, by the chat template; --tool-call-parser sets another format",
            found.name,
        )
    return found
