"""The common code of make_reference.py and make_adapters.py: the answers of a model, recorded and verified.

`expected.npz` beside a model has for prompt n the logits of every position in float32 (`logits_n`) and the ids
generated greedily by `generate()` (`greedy_n`). `margin` is the least distance between the best and the second best
logit on the way: wide enough to exclude changes by rounding.
"""

import argparse
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

FILE = "expected.npz"
NEW_TOKENS = 12
TOLERANCE = 2e-5  # of the largest logit of a prompt
MAX_SEEDS = 1000


@torch.no_grad()
def answers(model: Any, prompts: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """The model's results for prompts, and the least margin in greedy generation."""
    found: dict[str, np.ndarray] = {}
    margins = []
    for number, ids in enumerate(prompts):
        prompt = torch.tensor(ids.astype(np.int64))[None]
        out = model.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            return_dict_in_generate=True,
            output_scores=True,
        )
        best = torch.stack(out.scores).squeeze(1).topk(2).values
        margins.append(float((best[:, 0] - best[:, 1]).min()))
        found[f"logits_{number}"] = model(prompt).logits[0].float().numpy()
        found[f"greedy_{number}"] = out.sequences[0, len(ids) :].numpy().astype(np.int32)
    return {**found, "margin": np.asarray(min(margins), np.float32)}


def read_model(directory: Path) -> Any:
    """Load a model with the plain implementation of attention."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        directory, attn_implementation="eager"
    ).eval()


def read_prompts(directory: Path) -> list[np.ndarray]:
    """The recorded prompts of a reference model, in order."""
    stored = np.load(directory / FILE)
    num_prompts = sum(name.startswith("ids_") for name in stored.files)
    return [stored[f"ids_{number}"] for number in range(num_prompts)]


def record(
    name: str,
    directory: Path,
    attempt: Callable[[int], tuple[Any, dict[str, Any]]],
    save: Callable[[Any], None],
    margin: float,
) -> None:
    """Call `attempt` with seeds until the margins are wide, then write its model by `save`, and its answers."""
    for seed in range(MAX_SEEDS):
        model, expected = attempt(seed)
        if expected["margin"] > margin:
            break
    else:
        raise SystemExit(f"{name}: no seed gives margins above {margin}")
    shutil.rmtree(directory, ignore_errors=True)
    save(model)
    np.savez_compressed(directory / FILE, **expected)
    print(f"{name}: seed {seed}, margin {expected['margin']:.4f}")


def is_same(name: str, directory: Path, found: Mapping[str, np.ndarray]) -> bool:
    """Compare answers with those of the folder, and print the result."""
    stored = np.load(directory / FILE)
    worst, same = 0.0, True
    for number in range(sum(name.startswith("logits_") for name in stored.files)):
        logits = stored[f"logits_{number}"]
        worst = max(
            worst, float(np.abs(found[f"logits_{number}"] - logits).max() / np.abs(logits).max())
        )
        same &= np.array_equal(found[f"greedy_{number}"], stored[f"greedy_{number}"])
    holds = same and worst <= TOLERANCE
    ids = "same" if same else "differ"
    print(f"{name}: {'ok' if holds else 'DIFFERS'}, logits within {worst:.1e}, greedy ids {ids}")
    return holds


def set_up_torch() -> None:
    """Compute in one thread, for sums in one order, and log errors alone."""
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)


def make_parser(description: str | None, out: str) -> argparse.ArgumentParser:
    """The flags of both scripts. `out` is the default folder of their cases."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--verify", action="store_true", help="compare the existing folders, write nothing"
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="cases to make or verify; default: all"
    )
    parser.add_argument(
        "--out", type=Path, default=Path(out), help="the folder of all cases; default: %(default)s"
    )
    return parser


def run(
    args: argparse.Namespace,
    cases: Collection[str],
    make: Callable[[str, Path], None],
    verify: Callable[[str, Path], bool],
) -> int:
    """Make or verify the chosen cases; 1 if one differs."""
    names = args.names or list(cases)
    if unknown := [name for name in names if name not in cases]:
        raise SystemExit(
            f"NAME: {', '.join(unknown)} is not a case; the cases are {', '.join(cases)}"
        )
    set_up_torch()
    if args.verify:
        return 0 if all([verify(name, args.out / name) for name in names]) else 1
    for name in names:
        make(name, args.out / name)
    return 0
