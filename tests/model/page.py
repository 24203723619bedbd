"""`docs/models.md`, generated from the table of families and the tested models: `python -m tests.model.page`."""

import json
import textwrap

from lab.pages.markdown import Page, table
from orca_jax.assembly.support import NEEDS, Facts
from orca_jax.model.describe import read_model_config, refused
from orca_jax.model.families import FAMILIES
from orca_jax.model.families.family import Family
from orca_jax.model.sharding import can_share
from orca_jax.values.config import EngineConfig, ModelConfig
from tests.model.reference import NAMES, REFERENCE
from tests.project.source import ROOT

MESHES = (1, 2, 4, 6)
HYBRIDS = {
    "lfm2": {"full_attn_idxs": [2]},
    "lfm2_vl": {"text_config": {"full_attn_idxs": [2]}},
}
"""Keys of published models, where a default configuration has attention alone."""

_HEAD = """# Supported models

Generated from `orca_jax/model/families` and the models in `tests/fixtures/reference` by `python -m tests.model.page`.

A model directory has `config.json` and safetensors in the format of Hugging Face, or an Orbax checkpoint in `params/`.
`model_type` in `config.json` selects the family. Weights are served as float32, bfloat16 or float16 (`--dtype`). Files
of other programs with quantised weights keep their bits where products read them, and `--quantization` quantises while
loading ([quantisation.md](quantisation.md)).

LoRA: whether adapters can be served beside the model ([adapters.md](adapters.md)); "without states" are those of
attention and MLPs alone, and PEFT's `all-linear` makes others in layers with states.

"""
_TESTED = """
Images and sound are not supported: of a model for images and texts, the part for texts is served, and the weights of
the other parts are not loaded. Whatever
the family, a key of `config.json` that could change the results and is not implemented is refused by its name
([quickstart.md](quickstart.md), Your own Hugging Face model). Some directories of the Hub, such as those of Phi-3, name
code of their own in `auto_map`. It is never run: remove the key if transformers has the class.

Tensor parallelism, pipeline stages, schedulers and prefix caching do not depend on the family. Sliding windows may be
those of all layers or of some, as in Gemma and in Qwen with `max_window_layers` or `layer_types`. The KV
cache gives the blocks before a window back while a request runs ([operations.md](operations.md), The start). Only a
draft model masks the tokens outside of its windows and keeps them.

## Experts

Chunks, preemption, tensor parallelism and stages work with experts as with other MLPs. Each device has a part of the
width of every expert (`moe_intermediate_size`, or `intermediate_size` of Mixtral and OLMoE): `--tensor-parallel-size`
must divide it. There is no expert parallelism. Layers without experts, such as the first ones of GLM-4.5, make a
pattern that does not repeat, so that each layer is compiled. Files must have a tensor for each expert, or in some
families one for all experts of a layer, as published. Keys of training, such as `router_aux_loss_coef` and
`router_jitter_noise`, have no effect; but in Phi-MoE the noise sets which experts count.

## Tested shapes

For each of these small models with random weights, the logits of float32 are within 2e-5 of those of transformers, in
units of the largest logit, and greedy tokens are the same (`tests/model/test_reference.py`), on each of the numbers of
devices. The models other than GPT-2 and Llama run through the engine in chunks of 8 tokens, in pages of 8 tokens, with
a prefix cache, on two devices or in two stages (`tests/test_same_tokens.py`; many of these cases are marked slow).
Published weights are not part of the tests. Of the families that have no row, `tests/model/recorded` compares small
models with random configurations in the same way.

"""
_TESTED_HEAD = ("model", "layers", "heads", "KV heads", "head dim", "width", "options", "devices")


def page() -> str:
    """The text of the page."""
    families = [
        (f"`{family.name}`", family.models, f"`{family.architectures[0]}`", _has_adapters(family))
        for family in FAMILIES.values()
    ]
    known = table(("`model_type`", "models", "class of transformers", "LoRA"), families)
    tested = table(_TESTED_HEAD, [_row(name) for name in NAMES])
    return f"{_HEAD}{known}{_TESTED}{tested}{_types()}"


def num_served() -> int:
    """The number of served types in the lists of transformers."""
    return len(_known() & FAMILIES.keys())


def _known() -> set[str]:
    """The types of transformers' models for texts, and for images and texts."""
    types = json.loads((ROOT / "tests/fixtures/configs/types.json").read_text(encoding="utf-8"))
    return {*types["texts"], *types["images"]}


def _types() -> str:
    """The types of transformers that are refused."""
    known, refusals = _known(), refused()
    rows = [
        (f"`{kind}`", f"`{near}`", missing) for kind, (near, missing) in sorted(refusals.items())
    ]
    others = ", ".join(f"`{kind}`" for kind in sorted(known - FAMILIES.keys() - refusals.keys()))
    return f"""
## Refused types

Of the {len(known)} types in the lists of transformers 5.23 for causal language models and for images and texts,
{num_served()} are served. These are refused by name, with the nearest served family and the part that is missing:

{table(("`model_type`", "nearest", "missing"), rows)}
The others are refused too. Most are encoders with a decoder's head, models with an encoder and a decoder, and models
for images:
{textwrap.fill(others, 118, break_on_hyphens=False)}.
"""


def _has_adapters(family: Family) -> str:
    """What the table of support says of the family's default configuration."""
    config = family.config_from_hf(
        {"model_type": family.name, **family.needed, **HYBRIDS.get(family.name, {})}
    )
    facts = Facts(EngineConfig(enable_lora=True), model=config)
    unmet = any(
        need.is_unmet(facts)
        for need in NEEDS
        if (need.setting, need.moment) == ("enable_lora", "model")
    )
    if unmet:
        return "no"
    return "without states" if config.has_states else "yes"


def _row(name: str) -> tuple[str, ...]:
    config = read_model_config(REFERENCE / name)
    devices = ", ".join(str(size) for size in MESHES if can_share(config, size))
    sizes = (
        config.num_layers,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        config.embed_dim,
    )
    return (f"`{name}`", *map(str, sizes), _options(config), devices)


def _options(config: ModelConfig) -> str:
    rope = config.rope
    windows = [kind.window for kind in config.layers if kind.window is not None]
    num_windowed = len(windows)
    window = max(windows, default=None)
    ropes = {kind.rope for kind in config.layers} - {None}
    options = {
        "tied head": config.tied_embeddings,
        "biases": config.attention_bias and config.attention_out_bias,
        "biases of queries, keys, values": config.attention_bias and not config.attention_out_bias,
        f"window {window}": num_windowed == config.num_layers,
        f"window {window} in {num_windowed} layers": 0 < num_windowed < config.num_layers,
        "other rope in these layers": len(ropes) > 1,
        f"scores capped at {config.attention_soft_cap}": config.attention_soft_cap is not None,
        f"logits capped at {config.logit_soft_cap}": config.logit_soft_cap is not None,
        "norm of each head": config.qk_norm == "head",
        "norm of all heads": config.qk_norm == "all",
        "post-norms": config.residual == "post_norm",
        "pre- and post-norms": config.residual == "both_norms",
        "parallel residual": config.residual == "parallel",
        _experts(config): config.experts is not None,
        f"rope {rope.kind}" if rope else "": rope is not None and rope.kind != "default",
        f"{rope.rotated_dim} rotated dims" if rope else "": rope is not None
        and rope.rotated_dim is not None,
    }
    return ", ".join(option for option, is_set in options.items() if is_set)


def _experts(config: ModelConfig) -> str:
    experts = config.experts
    if experts is None:
        return ""
    shared = " and a shared one" if experts.shared_dim else ""
    return f"{experts.per_token} of {experts.count} experts{shared}"


PAGE = Page(ROOT / "docs" / "models.md", lambda _: page(), "python -m tests.model.page")

if __name__ == "__main__":
    PAGE.write()
    print(f"{num_served()} of {len(_known())} types are served")
