"""Records a checkpoint by Tunix's own saver, and compares Tunix's logits with those of transformers.

    python scripts/record_tunix.py [--out tests/fixtures/trees]

Needs google-tunix, in an environment of its own: `python -m venv ENV && ENV/bin/pip install google-tunix`. Neither the
package nor its tests use it. For each reference model below, Tunix reads the safetensors, and its logits are compared
with `expected.npz`. One model is written with `tunix.sft.checkpoint_manager.CheckpointManager`.

Llama and Qwen3 of Tunix 0.1.7 rotate with a theta of 1,000,000 whatever `ModelConfig.rope_theta` is, so the comparison
sets it in their modules.
"""

import argparse
import importlib
import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tunix.sft.checkpoint_manager import CheckpointManager

REFERENCE = Path(__file__).parents[1] / "tests" / "fixtures" / "reference"
MODELS = {"llama-12-heads-3-groups": "llama3", "qwen2-tied": "qwen2", "qwen3": "qwen3"}
RECORDED = "qwen2-tied"
STEP = 3
TOLERANCE = 2e-5


def read_model(name: str) -> Any:
    """A reference model as Tunix reads it."""
    kind = MODELS[name]
    module, params = (
        importlib.import_module(f"tunix.models.{kind}.{part}") for part in ("model", "params")
    )
    hf = json.loads((REFERENCE / name / "config.json").read_text())
    config = module.ModelConfig(
        num_layers=hf["num_hidden_layers"],
        vocab_size=hf["vocab_size"],
        embed_dim=hf["hidden_size"],
        hidden_dim=hf["intermediate_size"],
        num_heads=hf["num_attention_heads"],
        head_dim=hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"],
        num_kv_heads=hf["num_key_value_heads"],
        rope_theta=int(hf["rope_parameters"]["rope_theta"]),
        norm_eps=hf["rms_norm_eps"],
        **({"use_tied_embedding": hf["tie_word_embeddings"]} if kind != "llama3" else {}),
        **({"weight_tying": hf["tie_word_embeddings"]} if kind == "llama3" else {}),
    )
    if (rotate := getattr(module, "apply_rope", None)) is not None:
        vars(module)["apply_rope"] = partial(rotate, rope_theta=config.rope_theta)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    return params.create_model_from_safe_tensors(
        str(REFERENCE / name), config, mesh=mesh, dtype=jnp.float32
    )


def error_of(model: Any, name: str) -> float:
    """The largest difference to transformers' logits, relative to the largest logit."""
    expected = np.load(REFERENCE / name / "expected.npz")
    ids = expected["ids_2"]
    theirs = expected["logits_2"]
    positions = jnp.arange(len(ids))[None]
    mask = jnp.tril(jnp.ones((1, len(ids), len(ids)), bool))
    logits, _ = model(jnp.asarray(ids)[None], positions, None, mask)
    return float(np.abs(np.asarray(logits[0]) - theirs).max() / np.abs(theirs).max())


def main() -> None:
    """Compare all models, and write one."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=REFERENCE.parent / "trees", help="folder of the fixtures"
    )
    args = parser.parse_args()
    for name in MODELS:
        model = read_model(name)
        folder = (args.out / f"tunix-{name}").absolute()
        error = error_of(model, name)
        print(f"{name}: logits differ by {error:.1e}")
        assert error <= TOLERANCE, "Tunix reads another model"
        if name == RECORDED:
            shutil.rmtree(folder, ignore_errors=True)
            manager = CheckpointManager(str(folder))
            manager.save(STEP, model, force=True)
            manager.close()


if __name__ == "__main__":
    main()
