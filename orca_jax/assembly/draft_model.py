"""The draft model of speculation: its own weights, executor and KV cache on the devices of the large model."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from orca_jax.assembly.resolve import PAGE_SIZE, attention_of, dtype_of, page_layout, page_type, tokenizer_of
from orca_jax.assembly.settings import is_toy
from orca_jax.assembly.speculation import largest_batch
from orca_jax.assembly.support import Facts, check_support
from orca_jax.bundled import directory_of, is_gguf, pinned
from orca_jax.cache_spec import one_group
from orca_jax.config import CacheConfig, EngineConfig, ExecutorConfig, ModelConfig
from orca_jax.errors import ConfigError
from orca_jax.model.describe import read_model_config
from orca_jax.model.weight_files import check_weights
from orca_jax.sched.drafts.model import ModelProposer
from orca_jax.startup import StartTimes
from orca_jax.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import jax

_BUCKETS = (1, 4, 16, 64, 256)
"""Tokens of a launch: increments of few or many requests, and chunks of prompts."""


@dataclass(frozen=True)
class DraftModel:
    """A draft model that fits the large one; nothing is loaded.

    Attributes:
        config: settings of the engine.
        source: the directory or the preset.
        model: its configuration.
        max_model_len: most tokens of a request.
    """

    config: EngineConfig
    source: str
    model: ModelConfig
    max_model_len: int

    def start(self, devices: "list[jax.Device]", times: StartTimes, directory: str | None) -> ModelProposer:
        """Load the model, and compile its programs.

        Args:
            devices: the devices of the large model.
            times: takes the phases of the start.
            directory: the directory of compiled programs; None: they are not kept.
        """
        from orca_jax.assembly.executor import place_model, start_executor
        from orca_jax.model.sharding import most_shards

        config, speculative = self.config, self.config.speculative_config
        assert speculative is not None, "a draft model belongs to speculation"
        platform = devices[0].platform
        dtype = dtype_of(config, platform)
        size = most_shards(self.model, len(devices) // config.pipeline_parallel_size)
        placed = place_model(
            self.source, self.model, dtype=dtype, load_format="auto", seed=config.seed, devices=devices[:size]
        )
        rows, page_size = largest_batch(config, speculative), config.page_size or PAGE_SIZE
        pages_per_row = -(-self.max_model_len // page_size)
        cache_dtype = page_type(dtype, platform, has_bfloat16=False)
        groups = one_group(placed.config.layer_caches)
        cache = CacheConfig(groups, (rows * pages_per_row,), page_size, cache_dtype, page_layout(platform))
        shapes = ExecutorConfig(
            dtype=dtype,
            tensor_parallel_size=size,
            buckets=_BUCKETS,
            num_rows=rows,
            max_model_len=self.max_model_len,
            cache=cache,
            attention_implementation=attention_of(config, placed),
            compile_cache=directory,
        )
        executor = start_executor(placed, shapes, times, has_bars=config.progress)
        seconds = min(executor.launch_seconds.values())
        return ModelProposer(executor, rows, pages_per_row, speculative.num_speculative_tokens, seconds)


def describe_draft(
    config: EngineConfig, target: ModelConfig, tokenizer: Tokenizer, max_model_len: int
) -> DraftModel | None:
    """Find the draft model of the settings, and check that it fits; None if the settings have none.

    Args:
        config: checked settings.
        target: the large model.
        tokenizer: the tokenizer of the large model; one of the settings serves both models.
        max_model_len: most tokens of a request.

    Raises:
        ConfigError: it cannot be read, or does not fit; `param` is "speculative_config".
    """
    speculative = config.speculative_config
    if speculative is None or speculative.model is None:
        return None
    if is_toy(speculative.model) or is_gguf(speculative.model):
        raise _unfit(f"the draft model {speculative.model} must be a directory, a name of the Hub, or a preset")
    own = EngineConfig(speculative.model, download_dir=config.download_dir, seed=config.seed, progress=config.progress)
    try:
        own = pinned(own)
        source = directory_of(own) or own.model
        model = read_model_config(source, None)
    except ConfigError as error:
        raise _unfit(f"the draft model {speculative.model}: {error.message}") from None
    check_support(Facts(config, model=target, draft=model, max_model_len=max_model_len), "draft")
    try:
        check_weights(source, own.load_format)
        words = tokenizer_of(own, source) if config.tokenizer is None else tokenizer
    except ConfigError as error:
        raise _unfit(f"the draft model {speculative.model}: {error.message}") from None
    ids = range(model.vocab_size)
    if words is not tokenizer and any(words.token_bytes(each) != tokenizer.token_bytes(each) for each in ids):
        raise _unfit(f"the draft model {speculative.model} has another tokenizer than {config.model}")
    return DraftModel(config, source, model, max_model_len)


def _unfit(message: str) -> ConfigError:
    return ConfigError(f"speculative_config: {message}", param="speculative_config")
