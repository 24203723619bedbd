"""Records what `save_pretrained` of transformers writes for every served class.

    PYTHONPATH=. python scripts/record_saved.py [--verify]

Needs torch, transformers and safetensors, in an environment of their own (Python 3.11 suffices). The served classes are
those of docs/models.md. For each of them tests/fixtures/saved.json.gz has the config.json of the default configuration,
and of a small model with its names and shapes of tensors. Types of other programs, which transformers does not have,
are left out.
"""

import argparse
import json
import re
import sys
import tempfile
from pathlib import Path
from random import Random
from typing import Any

import torch
import transformers
from safetensors import safe_open
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.model.recorded.configs.dense import DENSE
from tests.model.recorded.configs.images import IMAGES
from tests.model.recorded.configs.mixtures import MIXTURES
from tests.model.recorded.configs.sizes import llama, tokens
from tests.model.saved.record import Saved, load, save
from tests.model.states.hybrids import NAMES, config_of

MAKERS = {**DENSE, **IMAGES, **MIXTURES}
_VISION = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
_OPT = {"hidden_size": 16, "ffn_dim": 24, "word_embed_proj_dim": 16, "num_hidden_layers": 2}
_SMALL: dict[str, dict[str, Any]] = {
    "gpt_neox": {
        "hidden_size": 32,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    },
    "gpt2": {"n_embd": 16, "n_head": 2, "n_layer": 2, "n_positions": 64},
    "opt": {**_OPT, "num_attention_heads": 2, "max_position_embeddings": 64},
}
"""Sizes of classes whose keys are not those of a Llama."""
_EXPERTS = {
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 8,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
_WRAPPED = {
    "gemma3": (
        "gemma3_text",
        {**_VISION, "intermediate_size": 16, "image_size": 16, "patch_size": 8},
    ),
    "gemma4": ("gemma4_text", {**_VISION, "intermediate_size": 16, "head_dim": 8}),
    "gemma4_unified": ("gemma4_unified_text", {"mm_embed_dim": 16, "output_proj_dims": 16}),
    "llama4": (
        "llama4_text",
        {**_VISION, "intermediate_size": 16, "image_size": 16, "patch_size": 8},
    ),
    "qwen3_5": (
        "qwen3_5_text",
        {"hidden_size": 16, "depth": 1, "num_heads": 2, "out_hidden_size": 16},
    ),
}
"""Classes for images and texts without a record of results: the type of their texts, and the part for images."""
_OTHER_TEXTS = {
    "glm46v": ("glm4v_moe", "glm4v_moe_text"),
    "mistral3": ("mistral4", "mistral4"),
    "internvl": ("qwen3_moe", "qwen3_moe"),
}
"""Classes for images and texts with other texts than in `small`: a type that has them, and the type of the texts."""


def served() -> list[str]:
    """The served types that transformers has."""
    page = Path("docs/models.md").read_text(encoding="utf-8")
    table = page[: page.index("## Experts")]
    found = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    return [kind for kind in found if kind in CONFIG_MAPPING]


def small(kind: str) -> dict[str, Any]:
    """The keys of a small model."""
    draw = Random(kind)
    if kind in MAKERS:
        return MAKERS[kind](draw, 0)
    if f"{kind}-0" in NAMES:
        return config_of(f"{kind}-0")
    if kind in _WRAPPED:
        texts, vision = _WRAPPED[kind]
        return {"text_config": {**small(texts), "model_type": texts}, "vision_config": vision}
    if kind in _SMALL:
        return {**tokens(), **_SMALL[kind]}
    known = CONFIG_MAPPING[kind].__dataclass_fields__
    keys = {**llama(draw, 0), **_EXPERTS}
    return {key: value for key, value in keys.items() if key in known}


def class_of(config: Any) -> Any:
    """The class of transformers that makes models of a configuration."""
    kinds = transformers.AutoModelForImageTextToText, transformers.AutoModelForCausalLM
    return next(kind for kind in kinds if type(config) in kind._model_mapping)


def with_other_texts(kind: str) -> dict[str, Any]:
    """The keys of a small model of `_OTHER_TEXTS`."""
    other, name = _OTHER_TEXTS[kind]
    keys = small(other)
    texts = {**keys.get("text_config", keys), "model_type": name}
    return {**small(kind), "text_config": texts}


def default(kind: str) -> dict[str, Any]:
    """The config.json of the default configuration, with the class that `save_pretrained` of a model adds."""
    config = CONFIG_MAPPING[kind]()
    config.architectures = [class_of(config)._model_mapping[type(config)].__name__]
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        return _read(folder)


def _read(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(folder, "config.json").read_text(encoding="utf-8"))
    return found


def record(kind: str, keys: dict[str, Any]) -> Saved:
    """One class, and a small model with some keys."""
    with tempfile.TemporaryDirectory() as folder:
        config = {**keys, "model_type": kind}
        Path(folder, "config.json").write_text(json.dumps(config), encoding="utf-8")
        parsed = transformers.AutoConfig.from_pretrained(folder)
        torch.manual_seed(0)
        class_of(parsed).from_config(parsed).save_pretrained(folder)
        shapes: dict[str, list[int]] = {}
        for file in sorted(Path(folder).glob("*.safetensors")):
            with safe_open(file, "np") as tensors:
                for name in list(tensors.keys()):
                    shapes[name] = tensors.get_slice(name).get_shape()
        return Saved(default(kind), _read(folder), shapes)


def main() -> int:
    """Write or compare the records; 1 if one differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--verify", action="store_true", help="compare the record, write nothing")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    found = {kind: record(kind, small(kind)) for kind in served()}
    for kind, (_, name) in _OTHER_TEXTS.items():
        found[f"{kind} of {name}"] = record(kind, with_other_texts(kind))
    if not args.verify:
        save(found)
        return 0
    stored = load()
    others = [kind for kind in {**stored, **found} if stored.get(kind) != found.get(kind)]
    print(f"{len(found)} records, others than stored: {others}")
    return bool(others)


if __name__ == "__main__":
    sys.exit(main())
