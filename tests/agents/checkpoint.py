"""A checkpoint for the turns of agents: each next token depends on the last token alone.

The chat template ends the prompt with a start token. Each start token begins a chain of tokens: a call, the answer
after a tool result, a title in JSON, or words without end. So an agent meets a real model directory, a real tokenizer
and a real engine, and the text of each answer is known.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

ROOT = Path(__file__).resolve().parents[2]
CONTEXT = 131_072
ANSWER = "The command has printed its output."
TITLE = '{"title": "Printing"}'
LOOP = "one, two, three, "
ENDLESS = "Count without end"
"""A message of the user with these words is answered by `LOOP`, again and again, if tools are given."""

_END, _START, _TURN = "<|end|>", ("<|call|>", "<|answer|>", "<|title|>", "<|loop|>"), "<|turn|>"
_WIDTH = 64  # one dimension for each token of the chains, and one for all others
_WORDS = 4096
_LOGIT = 16.0  # times 8 by the norm: no other token is ever sampled

_MESSAGES = """
{%- for message in messages %}<|turn|>{{ message.role }}: {{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{"name": {{ call.function.name | tojson }}, "arguments":
{{- call.function.arguments | tojson }}}</tool_call>
{%- endfor %}
{%- endfor %}
{%- set asked = messages | rejectattr("role", "equalto", "system") | list | last %}"""
TEMPLATE = f"""{{%- if tools %}}<|turn|>tools: {{{{ tools | tojson }}}}{{% endif %}}{_MESSAGES}
{{%- if not add_generation_prompt %}}
{{%- elif not tools %}}<|title|>
{{%- elif "{ENDLESS}" in asked.content %}}<|loop|>
{{%- elif asked.role == "tool" %}}<|answer|>
{{%- else %}}<|call|>
{{%- endif %}}"""
TEMPLATE_WITHOUT_TOOLS = _MESSAGES.partition("\n{%- for call")[0] + (
    "{%- endfor %}{%- if add_generation_prompt %}<|answer|>{% endif %}"
)


@dataclass(frozen=True)
class Call:
    """A tool call that the model generates."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The call as Hermes writes it."""
        return (
            f"<tool_call>{json.dumps({'name': self.name, 'arguments': self.arguments})}</tool_call>"
        )


def write_checkpoint(folder: Path, call: Call, template: str = TEMPLATE) -> None:
    """Write a model directory.

    Args:
        folder: the directory; made if it is missing.
        call: the call that follows a message of the user, if tools are given.
        template: the chat template.
    """
    folder.mkdir(parents=True, exist_ok=True)
    chains = {
        start: _pieces(text)
        for start, text in zip(_START, (call.text, ANSWER, TITLE, LOOP), strict=True)
    }
    tokenizer = _tokenizer(chains)
    following = _following(chains, tokenizer)
    vocab = tokenizer.get_vocab_size()
    config = {
        **{
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "dtype": "float32",
            "vocab_size": vocab,
        },
        **{
            "hidden_size": _WIDTH,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "max_position_embeddings": CONTEXT,
        },
        **{
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "tie_word_embeddings": False,
        },
        **{"bos_token_id": None, "eos_token_id": tokenizer.token_to_id(_END)},
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": _END}), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    save_file(_weights(following, vocab, tokenizer.token_to_id(_END)), folder / "model.safetensors")


def _pieces(text: str) -> list[str]:
    """A text cut into tokens at its blanks and tags."""
    return re.findall(r"</?\w+>|[^<\s]+\s*", text)


def _tokenizer(chains: Mapping[str, Sequence[str]]) -> Tokenizer:
    """A tokenizer of bytes whose words come from the documentation, with the tokens of the chains."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=_WORDS, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train(
        [str(ROOT / "docs" / page) for page in ("serving.md", "operations.md", "clients.md")],
        trainer,
    )
    tokenizer.add_special_tokens([_END, _TURN, *chains])
    pieces = dict.fromkeys(piece for chain in chains.values() for piece in chain)
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in pieces])
    return tokenizer


def _following(chains: Mapping[str, Sequence[str]], tokenizer: Tokenizer) -> dict[int, int]:
    """The next token of each token of a chain; all others are followed by the end."""
    following: dict[int, int] = {}
    for start, chain in chains.items():
        last = chain[0] if start == _START[-1] else _END
        ids = [tokenizer.token_to_id(token) for token in (start, *chain, last)]
        for one, other in pairwise(ids):
            assert following.setdefault(one, other) == other, (
                f"a token of {chain} has two successors"
            )
    return following


def _weights(following: Mapping[int, int], vocab: int, end: int) -> dict[str, np.ndarray]:
    """Weights of a Llama whose only layer adds nothing: the head reads the embedding of the last token."""
    assert len(following) < _WIDTH, f"the chains have {len(following)} tokens, and {_WIDTH - 1} fit"
    embedding, head = np.zeros((2, vocab, _WIDTH), np.float32)
    embedding[:, 0] = 1
    head[end, 0] = _LOGIT
    for column, (token, after) in enumerate(following.items(), 1):
        embedding[token] = np.eye(_WIDTH, dtype=np.float32)[column]
        head[after, column] = _LOGIT
    layer, ones = "model.layers.0", np.ones(_WIDTH, np.float32)
    shapes = {"q": (32, _WIDTH), "k": (16, _WIDTH), "v": (16, _WIDTH), "o": (_WIDTH, 32)}
    inner = {"gate": (16, _WIDTH), "up": (16, _WIDTH), "down": (_WIDTH, 16)}
    return {
        "model.embed_tokens.weight": embedding,
        "lm_head.weight": head,
        "model.norm.weight": ones,
        f"{layer}.input_layernorm.weight": ones,
        f"{layer}.post_attention_layernorm.weight": ones,
        **{
            f"{layer}.self_attn.{name}_proj.weight": np.zeros(shape, np.float32)
            for name, shape in shapes.items()
        },
        **{
            f"{layer}.mlp.{name}_proj.weight": np.zeros(shape, np.float32)
            for name, shape in inner.items()
        },
    }
