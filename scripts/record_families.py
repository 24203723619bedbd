"""Records the results of transformers for small random models of many families.

    PYTHONPATH=. python scripts/record_families.py [FAMILY ...] [--number 3] [--verify]

Needs torch, transformers and safetensors, in an environment of their own (Python 3.11 suffices). Each family has a file
in tests/fixtures/families. Greedy choices have wide margins, so that rounding changes no id.
"""

import argparse
import json
import sys
import tempfile
import zlib
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
import transformers
from safetensors import safe_open

from tests.model.recorded.configs.dense import DENSE
from tests.model.recorded.configs.images import IMAGES
from tests.model.recorded.configs.mixtures import MIXTURES
from tests.model.recorded.configs.sizes import VOCAB
from tests.model.recorded.record import NEW, PLACES, PROMPT, Recorded, load, save, write

MARGIN, ATTEMPTS = 5e-4, 200
TOLERANCE = 1e-5
MAKERS = {**DENSE, **IMAGES, **MIXTURES}


def record(family: str, number: int) -> Recorded:
    """One model and its results. Every other one has the config.json that transformers writes."""
    draw = Random(f"{family} {number}")
    config = {"model_type": family, **MAKERS[family](draw, number)}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
        parsed = transformers.AutoConfig.from_pretrained(folder)
        kind = class_of(parsed)
        torch.manual_seed(0)
        kind.from_config(parsed, attn_implementation="eager").save_pretrained(folder)
        shapes: dict[str, tuple[int, ...]] = {}
        for file in sorted(path.glob("*.safetensors")):
            with safe_open(file, "np") as tensors:
                shapes |= {
                    name: tuple(tensors.get_slice(name).get_shape())
                    for name in list(tensors.keys())
                }
        saved = json.loads((path / "config.json").read_text(encoding="utf-8"))
        config = saved if number % 2 else config
        write(path, config, shapes)
        model, info = kind.from_pretrained(
            folder, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
        )
    wrong = {key: value for key, value in info.items() if value}
    if wrong:
        raise SystemExit(f"{family} {number}: {wrong}")
    model.eval()
    for attempt in range(ATTEMPTS):
        prompt = np.random.default_rng(
            zlib.crc32(f"{family} {number} {attempt}".encode())
        ).integers(3, VOCAB, PROMPT)
        ids, logprobs, margin = answers(model, prompt)
        if margin > MARGIN:
            return Recorded(config, shapes, ids.astype(np.int32), logprobs)
    raise SystemExit(f"{family} {number}: none of {ATTEMPTS} prompts has margins above {MARGIN}")


def exact(model: Recorded) -> tuple[dict[str, Any], dict[str, list[int]], list[int]]:
    """What must be equal in two records of a model: all but the version of transformers, and log probabilities."""
    config = {key: value for key, value in model.config.items() if key != "transformers_version"}
    shapes = {name: list(shape) for name, shape in model.shapes.items()}
    return config, shapes, model.ids.tolist()


def class_of(config: Any) -> Any:
    """The class of transformers that makes models of a configuration."""
    kinds = transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText
    return next(kind for kind in kinds if type(config) in kind._model_mapping)


@torch.no_grad()
def answers(model: Any, prompt: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """The ids of a prompt and its greedy answer, log probabilities, and the least margin of a choice."""
    ids = prompt.tolist()
    margin = float("inf")
    for _ in range(NEW):
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()
        best = logits[-1].topk(2).values
        margin = min(margin, float(best[0] - best[1]))
        if margin <= MARGIN:
            break
        ids.append(int(logits[-1].argmax()))
    else:
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()
        return np.array(ids), logits.log_softmax(dim=1)[list(PLACES)].numpy(), margin
    return np.array(ids), logits.numpy(), margin


def main() -> int:
    """Write or compare the records; 1 if one differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("families", nargs="*", default=sorted(MAKERS))
    parser.add_argument("--number", type=int, default=3, help="models of each family")
    parser.add_argument("--verify", action="store_true", help="compare the record, write nothing")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    worst = 0.0
    for family in args.families:
        found = [record(family, number) for number in range(args.number)]
        if not args.verify:
            save(family, found)
            continue
        for new, old in zip(found, load(family), strict=True):
            assert exact(new) == exact(old), family
            worst = max(worst, float(np.abs(new.logprobs - old.logprobs).max()))
    print(f"largest difference {worst:.1e}")
    return 0 if worst <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
