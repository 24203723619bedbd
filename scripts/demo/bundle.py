"""Writes a trained model as a model directory for a server, and draws samples and the picture for its card."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from tokenizers import Tokenizer

from demo.data import ASSISTANT, END, USER, mark_id
from orca_jax.helpers.orbax_names import PARAMS
from orca_jax.model.checkpoint import save_decoder
from orca_jax.model.transformer import Decoder

matplotlib.use("agg")

# The model was trained without tools. The template shows them, so that a call with tools can be tried with the demo.
CHAT_TEMPLATE = f"""\
{{%- if tools -%}}
{{{{- '{USER}Tools: ' + (tools | tojson) + '\\nCall one by <tool_call>' -}}}}
{{{{- '{{"name": "its name", "arguments": {{}}}}</tool_call>\\n' -}}}}
{{%- endif -%}}
{{%- for message in messages -%}}
{{%- if message.role == 'assistant' -%}}
{{{{- '{ASSISTANT}' + message.content -}}}}
{{%- for call in message.tool_calls or [] -%}}
{{{{- '<tool_call>' + (call.function | tojson) + '</tool_call>' -}}}}
{{%- endfor -%}}
{{{{- '{END}' -}}}}
{{%- else -%}}
{{{{- '{USER}' + message.content -}}}}
{{%- endif -%}}
{{%- endfor -%}}
{{%- if add_generation_prompt -%}}
{{{{- '{ASSISTANT}' -}}}}
{{%- endif -%}}
"""


@dataclass(frozen=True)
class Record:
    """The state of training at one evaluation; losses are in nats per token."""

    step: int
    tokens: int
    minutes: float
    train_loss: float
    answer_loss: float
    text_loss: float
    accuracy: dict[str, float]  # share of right answers to held-out tasks, by group


def hf_config(decoder: Decoder, end_id: int) -> dict[str, Any]:
    """The model's config.json with the keys of Hugging Face's Qwen3."""
    config = decoder.config
    return {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_positions,
        "hidden_size": config.embed_dim,
        "intermediate_size": config.mlp_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope.theta if config.rope else None,
        "tie_word_embeddings": True,
        "bos_token_id": end_id,
        "eos_token_id": end_id,
        "dtype": "float32",
    }


def write_model(directory: Path, decoder: Decoder, tokenizer: Tokenizer) -> None:
    """Write weights as bfloat16, configuration, tokenizer and chat template, in place of an earlier model."""
    fresh = directory / "new"
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    save_decoder(decoder, fresh, "bfloat16")
    shutil.rmtree(directory / PARAMS, ignore_errors=True)
    (fresh / PARAMS).rename(directory / PARAMS)
    fresh.rmdir()
    end_id = mark_id(tokenizer, END)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    _write_json(directory / "config.json", hf_config(decoder, end_id))
    _write_json(
        directory / "generation_config.json",
        {"bos_token_id": end_id, "eos_token_id": end_id, "temperature": 0.7, "top_p": 0.95},
    )
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": END,
            "eos_token": END,
            "add_bos_token": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": decoder.config.max_positions,
        },
    )


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def draw_curve(path: Path, history: Sequence[Record]) -> None:
    """The loss over the tokens seen, as a picture."""
    figure = Figure(figsize=(7, 4), dpi=110, layout="constrained")
    axes = figure.subplots()
    tokens = [record.tokens / 1e6 for record in history]
    for name, label in (
        ("train_loss", "training, all"),
        ("text_loss", "held out, literature"),
        ("answer_loss", "held out, answers"),
    ):
        axes.plot(
            tokens,
            [getattr(record, name) for record in history],
            label=label,
            marker="." if len(tokens) < 50 else "",
        )
    axes.set(
        xlabel="million tokens", ylabel="loss, nats per token", title="Training of the demo model"
    )
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, metadata={"Software": None})
