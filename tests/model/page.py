"""`docs/models.md`, generated from the table of families and the tested models: `python -m tests.model.page`."""

from orca_jax.config import ModelConfig
from orca_jax.model.describe import read_model_config
from orca_jax.model.families import FAMILIES
from orca_jax.model.sharding import can_share
from tests.model.reference import NAMES, REFERENCE
from tests.project.source import ROOT

PAGE = ROOT / "docs" / "models.md"
MESHES = (1, 2, 4, 6)

_HEAD = """# Supported models

Generated from `orca_jax/model/families` and the models in `tests/fixtures/reference` by `python -m tests.model.page`.

A model directory has `config.json` and safetensors in the format of Hugging Face, or an Orbax checkpoint in `params/`.
`model_type` in `config.json` selects the family. Weights are served as float32, bfloat16 or float16 (`--dtype`); files
with quantised weights of other programs are refused. `--quantization` quantises while loading
([quantisation.md](quantisation.md)).

| `model_type` | models | class of transformers |
|---|---|---|
"""
_TESTED = """
Models with experts, images or sound are not supported. Neither are models in which only some layers have a sliding
window. Whatever the family, a key of `config.json` that could change the results and is not implemented is refused by
its name ([quickstart.md](quickstart.md), Your own Hugging Face model). Some directories of the Hub, such as those of
Phi-3, name code of their own in `auto_map`. It is never run: remove the key if transformers has the class.

Tensor parallelism, pipeline stages, schedulers and prefix caching do not depend on the family. With a sliding window
the KV cache still holds all tokens of a request.

## Tested shapes

For each of these small models with random weights, the logits of float32 are within 2e-5 of those of transformers, in
units of the largest logit, and greedy tokens are the same (`tests/model/test_reference.py`), on each of the numbers of
devices. The models other than GPT-2 and Llama run through the engine in chunks of 8 tokens, in pages of 8 tokens, with
a prefix cache, on two devices or in two stages (`tests/test_same_tokens.py`; many of these cases are marked slow).
Published weights are not part of the tests.

| model | layers | heads | KV heads | head dim | width | options | devices |
|---|---|---|---|---|---|---|---|
"""


def page() -> str:
    """The text of the page."""
    families = [
        f"| `{family.name}` | {family.models} | `{family.architectures[0]}` |\n" for family in FAMILIES.values()
    ]
    return _HEAD + "".join(families) + _TESTED + "".join(_row(name) for name in NAMES)


def _row(name: str) -> str:
    config = read_model_config(REFERENCE / name)
    devices = ", ".join(str(size) for size in MESHES if can_share(config, size))
    sizes = config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim, config.embed_dim
    return f"| `{name}` | {' | '.join(map(str, sizes))} | {_options(config)} | {devices} |\n"


def _options(config: ModelConfig) -> str:
    rope = config.rope
    options = {
        "tied head": config.tied_embeddings,
        "biases": config.attention_bias and config.attention_out_bias,
        "biases of queries, keys, values": config.attention_bias and not config.attention_out_bias,
        f"window {config.sliding_window}": config.sliding_window is not None,
        "norm of each head": config.qk_norm == "head",
        "norm of all heads": config.qk_norm == "all",
        "post-norms": config.residual == "post_norm",
        "parallel residual": config.residual == "parallel",
        f"rope {rope.kind}" if rope else "": rope is not None and rope.kind != "default",
        f"{rope.rotated_dim} rotated dims" if rope else "": rope is not None and rope.rotated_dim is not None,
    }
    return ", ".join(option for option, is_set in options.items() if is_set)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
