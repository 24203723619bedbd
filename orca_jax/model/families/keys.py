"""The keys of a config.json: those with one supported value, those without effect, and the refusal of all others.

A key that a family has a reader for is known (`Family.keys`). Every other key must be in a table of this module. So no
key with an effect on the arithmetic is ignored.
"""

from collections.abc import Mapping, Sequence

from orca_jax.model.families.base import words
from orca_jax.model.families.family import SHARED, Family
from orca_jax.model.families.values import HfConfig, is_same, refusal
from orca_jax.values.checks import closest, short
from orca_jax.values.config import ModelConfig
from orca_jax.values.errors import ConfigError

FIXED: Mapping[str, tuple[object, ...]] = {
    "add_cross_attention": (False, None),
    "attention_chunk_size": (None,),
    "compression_config": (None,),
    "cross_attention_hidden_size": (None,),
    "fusion_config": (None,),
    "is_causal": (True,),  # transformers reads null as false
    "is_encoder_decoder": (False, None),
    "layer_types": (None,),
    "per_layer_config": (None, {}),
    "pruned_heads": (None, {}),
    "quantization": (None,),
    "quantization_config": (None,),
    "rope_interleaved": (False, None),
    "sliding_window": (None,),
    "transformers_weights": (None,),
    "use_sliding_window": (False, None),
}
"""Keys with an effect on the arithmetic, and their values without one."""

HARMLESS: Mapping[str, frozenset[str]] = {
    "notes of the program that wrote the file": words(
        "_attn_implementation_autoset _commit_hash _name_or_path author created_date description "
        "finetuning_task is_llama_config is_matryoshka matryoshka_dimensions license n_special "
        "name_or_path predict_special_tokens transformers.js_config transformers_version "
        "unsloth_fixed unsloth_version"
    ),
    "training: dropout, initial values, memory": words(
        "attention_dropout attention_probs_dropout_prob attn_pdrop embd_pdrop "
        "gradient_checkpointing hidden_dropout hidden_dropout_prob initializer_range resid_pdrop "
        "tf_legacy_loss use_bfloat16"
    ),
    "the type of the stored weights; --dtype sets the type here": words("dtype torch_dtype"),
    "heads for other tasks": words(
        "_num_labels classifier_dropout id2label label2id num_labels problem_type "
        "summary_activation summary_first_dropout summary_proj_to_labels summary_type "
        "summary_use_proj"
    ),
    "the same results, computed otherwise": words(
        "_attn_implementation _flash_attn_2_enabled attn_implementation chunk_size_feed_forward "
        "output_attentions output_hidden_states output_past pretraining_tp reorder_and_upcast_attn "
        "return_dict torchscript use_cache xla_device"
    ),
    "roles in models of another kind": words(
        "decoder_start_token_id is_decoder tie_encoder_decoder type_vocab_size"
    ),
    "tokenizers and prompts": words(
        "_pad_token_id mask_token_id model_max_length pad_token_id prefix sep_token_id "
        "task_specific_params tokenizer_class unk_token_id"
    ),
    "limits that transformers does not read": words("max_sequence_length n_ctx"),
    "defaults of generate(), read with the sampling defaults (text/generation_config.py)": words(
        "bad_words_ids begin_suppress_tokens diversity_penalty do_sample early_stopping "
        "encoder_no_repeat_ngram_size exponential_decay_length_penalty forced_bos_token_id "
        "forced_eos_token_id length_penalty max_length max_new_tokens min_length min_p "
        "no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_scores "
        "remove_invalid_values repetition_penalty return_dict_in_generate suppress_tokens "
        "temperature top_k top_p typical_p"
    ),
}
"""Keys without effect on the logits, by the reason. Their values are not read."""

_IGNORED = frozenset().union(*HARMLESS.values())
_OWN_CODE = frozenset({"AutoConfig", "AutoModel", "AutoModelForCausalLM"})
_QUANTISED = (
    "weights quantised by other programs are read from quantization_config alone; use the model's weights without "
    "quantization, and give --quantization int8 or int4"
)
_REMEDIES: Mapping[str, str] = {
    "is_causal": "only causal decoders are supported",
    "decoder_sparse_step": "all layers must have experts",
    "mlp_only_layers": "all layers must have experts",
    "quantization_config": _QUANTISED,
    "quantization": _QUANTISED,
    "compression_config": _QUANTISED,
}


def check_keys(hf: HfConfig, family: Family) -> None:
    """Refuse every key with a possible effect on the results, unless this family reads it.

    Raises:
        ConfigError: a key is unknown, or has a value without support in the decoder. The error names the key.
    """
    for key, values in {**FIXED, **family.fixed}.items():
        is_free = key in family.keys or key in family.harmless
        if key in hf and not is_free and not any(is_same(hf[key], value) for value in values):
            remedy = _REMEDIES.get(key, "the decoder has no such option")
            message = f"config.json: {key} {short(hf[key])} is not supported; it must be {values[0]!r}: {remedy}"
            raise ConfigError(message, param=key)
    of_family = family.keys | family.aliases.keys() | family.fixed.keys() | family.harmless
    known = SHARED | of_family | FIXED.keys() | _IGNORED
    unknown = [key for key, value in hf.items() if key not in known and value is not None]
    if unknown:
        raise _unknown(unknown, sorted(family.keys | family.aliases.keys() | SHARED), family)
    _check_classes(hf, family)


def _unknown(keys: Sequence[str], read: Sequence[str], family: Family) -> ConfigError:
    names = ", ".join(short(key) for key in keys[:5]) + (
        f" and {len(keys) - 5} more" if len(keys) > 5 else ""
    )
    near = closest(keys[0][:50], read)
    hint = "if" if near is None else f"did you mean {near!r}? If not, and"
    message = (
        f"config.json: unknown for {family.name}: {names}; a key without a meaning here may change the results of the "
        f"model; {hint} the model does not need it, remove it from config.json"
    )
    return ConfigError(message, param=keys[0])


def _check_classes(hf: HfConfig, family: Family) -> None:
    """Refuse models of another class, and those with code of their own. Such code is never run here."""
    classes = hf.get("architectures")
    if classes is not None and not (
        isinstance(classes, list) and all(isinstance(name, str) for name in classes)
    ):
        raise refusal("architectures", "must be a list of names", classes)
    if classes and not set(classes) & set(family.architectures):
        raise ConfigError(
            f"config.json: architectures {short(classes)} is not supported for {family.name}, only "
            f"{', '.join(family.architectures)}; correct it if the weights are those of such a model",
            param="architectures",
        )
    own = hf.get("auto_map")
    if own is not None and not isinstance(own, dict):
        raise refusal("auto_map", "must be an object", own)
    found = sorted(_OWN_CODE & own.keys()) if own else []
    if found:
        raise ConfigError(
            f"config.json: auto_map names code of the model's own for {', '.join(found)}, which is never run here; "
            f"if the weights are those of a plain {family.architectures[0]}, remove auto_map",
            param="auto_map",
        )


def resolve_aliases(hf: HfConfig, family: Family) -> HfConfig:
    """The configuration with each alias replaced by its key.

    Raises:
        ConfigError: an alias and its key have different values.
    """
    resolved = {key: value for key, value in hf.items() if key not in family.aliases}
    for alias, key in family.aliases.items():
        value = hf.get(alias)
        if value is None:
            continue
        if hf.get(key) is not None and not is_same(hf[key], value):
            message = f"config.json: {alias} {short(value)} contradicts {key} {short(hf[key])}; remove one of them"
            raise ConfigError(message, param=alias)
        resolved[key] = value
    return resolved


def read_text(text: HfConfig, family: Family) -> ModelConfig:
    """Read the configuration of texts; raises `ConfigError`, which says where the key is."""
    try:
        check_keys(text, family)
        return family.config_from_hf(resolve_aliases(text, family))
    except ConfigError as error:
        raise ConfigError(
            error.message.replace("json:", "json: text_config:", 1), param=error.param
        ) from None
