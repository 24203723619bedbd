"""Records the results of transformers for models with states and latents of the tests, or verifies the record.

    PYTHONPATH=. python scripts/record_hybrids.py [--verify] [NAME ...]

Needs torch, transformers and safetensors, in an environment of their own (Python 3.11 suffices). For each model of
`tests.model.states.hybrids` and each of its prompts, the file has the ids generated greedily after the prompt, and the
log probabilities after every token of both. Greedy choices have wide margins, so that rounding changes no id; and
changes of the weights by rounding hardly change the log probabilities, where the answer is to be compared closely. If
a class computes in float64, too, the log probabilities are those, and float32's differ by less than tests allow.
"""

import argparse
import copy
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from tests.model.states.hybrids import NAMES, NEW, PROMPTS, RECORD, prompt, write

MARGIN = 5e-3
STABLE = 1e-5
EXACT = 2e-5
ATTEMPTS = 40
TOLERANCE = 1e-5
NOT_THERE = re.compile(r"_decay$|slope_rate$|vision_tower|projector|visual")


@torch.no_grad()
def answers(name: str) -> dict[str, np.ndarray]:
    """The ids and log probabilities of all prompts of a model."""
    with tempfile.TemporaryDirectory() as folder:
        write(name, Path(folder))
        kinds = transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText
        parsed = transformers.AutoConfig.from_pretrained(folder)
        load = next(kind for kind in kinds if type(parsed) in kind._model_mapping).from_pretrained
        model, info = load(
            folder, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
        )
    wrong = {key: value for key, value in info.items() if value}
    # The decay of linear attention is computed, and the part for images has no effect: neither is in the tests' files.
    wrong["missing_keys"] = {key for key in info["missing_keys"] if not NOT_THERE.search(key)}
    if any(wrong.values()):
        raise SystemExit(f"{name}: {wrong}")
    model.eval()
    rounded = copy.deepcopy(model)
    for index, values in enumerate(rounded.parameters()):
        values *= 1 + 1e-7 * torch.randn(
            values.shape, generator=torch.Generator().manual_seed(index)
        )
    others = [(rounded, STABLE), *_in_float64(model)]
    found = dict[str, np.ndarray]()
    for number, length in enumerate(PROMPTS):
        ids, logprobs = _first_clear(
            model, others, [prompt(name, length, attempt) for attempt in range(ATTEMPTS)]
        )
        # those of the prompt, and the generated ones
        found[f"{name}/ids_{number}"] = ids.numpy().astype(np.int32)
        found[f"{name}/logprobs_{number}"] = logprobs.float().numpy()
    return found


def _in_float64(model: Any) -> list[tuple[Any, float]]:
    """The model in float64 and the largest difference from it; nothing if parts of its class are float32 alone."""
    double = copy.deepcopy(model).double()
    try:
        double(torch.tensor([[0, 1]]), use_cache=False)
    except RuntimeError:
        return []
    return [(double, EXACT)]


def _first_clear(
    model: Any, others: Sequence[tuple[Any, float]], attempts: Sequence[np.ndarray]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The first prompt with wide margins and the ids generated after it, and the log probabilities after each.

    `others` are models with the same weights but for rounding, and the differences of log probabilities allowed.
    """
    for ids in attempts:
        prompt_ids = torch.tensor(ids)[None]
        # Without a cache: with one, that of Nemotron-H is not of the same model.
        options = {"do_sample": False, "max_new_tokens": NEW, "use_cache": False}
        whole = model.generate(
            input_ids=prompt_ids, attention_mask=torch.ones_like(prompt_ids), **options
        )
        logits = model(whole, use_cache=False).logits[0].float()
        best = logits.topk(2).values[len(ids) - 1 : -1]
        is_clear = float((best[:, 0] - best[:, 1]).min()) > MARGIN
        logprobs = logits.log_softmax(dim=1)
        best_known = logprobs
        for other, limit in others:
            theirs = other(whole, use_cache=False).logits[0].log_softmax(dim=1)
            is_clear &= float((theirs - logprobs).abs().max()) < limit
            if theirs.dtype == torch.float64:
                best_known = theirs
        if is_clear and torch.equal(logits.argmax(dim=1)[len(ids) - 1 : -1], whole[0, len(ids) :]):
            return whole[0], best_known
    raise SystemExit(f"none of {len(attempts)} prompts is clear")


def main() -> int:
    """Write the record, or compare it; 1 if it differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--verify", action="store_true", help="compare the record, write nothing")
    parser.add_argument(
        "names", nargs="*", help="of models whose records are replaced; without names those of all"
    )
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    found: dict[str, np.ndarray] = {}
    for name in args.names or NAMES:
        found |= answers(name)
    stored = np.load(RECORD)
    if not args.verify:
        np.savez_compressed(RECORD, **{**stored, **found})
        return 0
    same = set(found) <= set(stored.files) and (bool(args.names) or len(found) == len(stored.files))
    worst = (
        max(
            float(np.abs(stored[key].astype(np.float64) - value).max())
            for key, value in found.items()
        )
        if same
        else 1
    )
    print(f"largest difference {worst:.1e}")
    return 0 if worst <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
