"""The model of the settings before anything is loaded: its files, configuration and tokenizer."""

from dataclasses import dataclass

from orca_jax.assembly.draft_model import DraftModel, describe_draft
from orca_jax.assembly.resolve import max_model_len_of, tokenizer_of
from orca_jax.assembly.support import Facts, check_support, quantised
from orca_jax.bundled import directory_of, pinned, texts_of
from orca_jax.config import EngineConfig, ModelConfig
from orca_jax.model.describe import read_model_config
from orca_jax.model.weight_files import check_weights
from orca_jax.text.grammar import GrammarFactory
from orca_jax.text.tokenizer import Tokenizer


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
    draft: DraftModel | None


def describe(config: EngineConfig) -> Described:
    """Find the model of checked settings; a model of the Hub is downloaded.

    Raises:
        ConfigError: it cannot be read, or does not support a setting; `param` names the setting.
    """
    check_support(Facts(config), "texts")
    config = pinned(config)
    source, texts = directory_of(config) or config.model, texts_of(config)
    model = quantised(config, read_model_config(source, config.decoder))
    tokenizer = tokenizer_of(config, source)
    max_model_len = max_model_len_of(config, model)
    check_weights(source, config.load_format)
    draft = describe_draft(config, model, tokenizer, max_model_len)
    grammars = GrammarFactory(tokenizer, model.vocab_size, model.eos_token_ids)
    return Described(config, source, texts, model, tokenizer, grammars, max_model_len, draft)
