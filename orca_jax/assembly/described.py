"""The models of the settings before anything is loaded: files, configurations and tokenizers; the start of a draft."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from orca_jax.assembly.choices import Drafts, is_toy
from orca_jax.assembly.resolve import page_type
from orca_jax.assembly.support import Facts, check_support, quantised
from orca_jax.helpers.bundled import directory_of, is_gguf, is_preset, pinned, texts_of
from orca_jax.model.describe import read_model_config
from orca_jax.model.weight_files import check_weights
from orca_jax.sched.drafts.model import ModelProposer
from orca_jax.text.grammar import GrammarFactory
from orca_jax.text.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from orca_jax.values.cache_spec import ceil_div, one_group
from orca_jax.values.config import (
    AttentionName,
    CacheConfig,
    DType,
    EngineConfig,
    ExecutorConfig,
    ModelConfig,
)
from orca_jax.values.errors import ConfigError
from orca_jax.values.startup import StartTimes

if TYPE_CHECKING:
    import jax

_BUCKETS = (1, 4, 16, 64, 256)
"""Tokens of a launch: increments of few or many requests, and chunks of prompts."""


@dataclass(frozen=True)
class DraftModel:
    """A draft model that fits the large one. It has its own weights, executor and KV cache on the same devices."""

    source: str  # the directory or the preset
    model: ModelConfig
    max_model_len: int  # most tokens of a request
    drafts: Drafts
    seed: int  # of random weights
    has_bars: bool  # draw progress bars

    def start(
        self,
        devices: "list[jax.Device]",
        dtype: DType,
        page_size: int,
        attention: AttentionName | None,
        times: StartTimes,
        directory: str | None,
    ) -> ModelProposer:
        """Load the model, and compile its programs.

        Args:
            devices: the devices of one stage of the large model.
            dtype: the type of its weights.
            page_size: tokens of a page.
            attention: the wanted implementation; None for the default of the devices.
            times: takes the phases of the start.
            directory: the directory of compiled programs; None: they are not kept.
        """
        from orca_jax.assembly.executor import place_model, start_executor
        from orca_jax.model.sharding import most_shards

        size = most_shards(self.model, len(devices))
        rows = self.drafts.max_bs
        placed = place_model(
            self.source,
            self.model,
            dtype=dtype,
            load_format="auto",
            seed=self.seed,
            devices=devices[:size],
        )
        pages_per_row = ceil_div(self.max_model_len, page_size)
        cache_dtype = page_type(dtype, converts=placed.platform.converts_pages, has_bfloat16=False)
        groups = one_group(placed.config.layer_caches)
        cache = CacheConfig(
            groups, (rows * pages_per_row,), page_size, cache_dtype, placed.platform.page_layout
        )
        shapes = ExecutorConfig(
            dtype=dtype,
            tensor_parallel_size=size,
            buckets=_BUCKETS,
            num_rows=rows,
            max_model_len=self.max_model_len,
            cache=cache,
            attention_implementation=attention,
            has_library=placed.library is not None,
            compile_cache=directory,
        )
        executor = start_executor(placed, shapes, times, has_bars=self.has_bars)
        seconds = min(executor.launch_seconds.values())
        return ModelProposer(executor, rows, pages_per_row, self.drafts.num_tokens, seconds)


@dataclass(frozen=True)
class Described:
    """A model that can be served with its settings."""

    config: EngineConfig  # with the commit of a model of the Hub
    source: str  # the directory or the preset
    texts: str  # directory of the chat template and the sampling defaults; empty for a preset
    model: ModelConfig
    tokenizer: Tokenizer
    grammars: GrammarFactory
    max_model_len: int  # most tokens of a request
    draft: DraftModel | None = None


def describe(config: EngineConfig, drafts: Drafts | None) -> Described:
    """Find the models of checked settings; a model of the Hub is downloaded.

    Raises:
        ConfigError: one cannot be read, or does not support a setting; `param` names the setting.
    """
    config = pinned(config)
    source = directory_of(config) or config.model
    texts = texts_of(config)
    model = quantised(config, read_model_config(source, config.decoder), source)
    max_model_len = config.max_model_len or model.max_positions
    tokenizer = tokenizer_of(config.tokenizer, source)
    check_weights(source, config.load_format)
    grammars = GrammarFactory(tokenizer, model.vocab_size, model.eos_token_ids)
    found = Described(config, source, texts, model, tokenizer, grammars, max_model_len)
    if drafts is None or drafts.model is None:
        return found
    own = EngineConfig(
        drafts.model, download_dir=config.download_dir, seed=config.seed, progress=config.progress
    )
    return replace(found, draft=describe_draft(own, drafts, found))


def describe_draft(own: EngineConfig, drafts: Drafts, target: Described) -> DraftModel:
    """Find a draft model, and check that it fits.

    Args:
        own: settings of the draft model.
        drafts: the proposals of the settings.
        target: the large model. A tokenizer of its settings serves both models.

    Raises:
        ConfigError: it cannot be read, or does not fit; `param` is "speculative_config".
    """
    name = own.model
    words = target.tokenizer
    large = target.config
    if is_toy(name) or is_gguf(name):
        raise _unfit(f"the draft model {name} must be a directory, a name of the Hub, or a preset")
    try:
        own = pinned(own)
        source = directory_of(own) or own.model
        model = read_model_config(source, None)
    except ConfigError as error:
        raise _unfit(f"the draft model {name}: {error.message}") from None
    check_support(
        Facts(large, model=target.model, draft=model, max_model_len=target.max_model_len), "draft"
    )
    try:
        check_weights(source, own.load_format)
        own_words = tokenizer_of(own.tokenizer, source) if large.tokenizer is None else words
    except ConfigError as error:
        raise _unfit(f"the draft model {name}: {error.message}") from None
    ids = range(model.vocab_size)
    if own_words is not words and any(
        own_words.token_bytes(each) != words.token_bytes(each) for each in ids
    ):
        raise _unfit(f"the draft model {name} has another tokenizer than {large.model}")
    return DraftModel(source, model, target.max_model_len, drafts, own.seed, own.progress)


def _unfit(message: str) -> ConfigError:
    return ConfigError(f"speculative_config: {message}", param="speculative_config")


def tokenizer_of(wanted: str | None, source: str) -> Tokenizer:
    """Return the tokenizer of the settings, or without one the tokenizer of the model; a preset has that of bytes.

    Raises:
        ConfigError: the tokenizer is missing or cannot be used; `param` is "tokenizer", or "model" for a model's GGUF
            file that cannot be read.
    """
    if wanted is None:
        if is_preset(source):
            return ByteTokenizer()
        return load_tokenizer(source)
    try:
        return load_tokenizer(wanted)
    except ConfigError as error:  # of a GGUF file, errors name the model
        raise ConfigError(error.message, param="tokenizer") from None
