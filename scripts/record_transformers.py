"""Records the results of transformers for the random model directories of the tests.

    PYTHONPATH=. python scripts/record_transformers.py [--out tests/fixtures/configs/transformers.json]

Needs torch, transformers and safetensors, in an environment of their own (Python 3.11 suffices). For every directory of
`tests.model.random_directories` the file has the error of transformers, or its end tokens, the ids generated greedily,
and some logits. Prompts with small margins are passed over, so that rounding cannot change an id.
"""

import argparse
import json
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.model.random_directories import FAMILIES, NEW, Directory, directory

MARGIN = 5e-3
SECONDS = 60


@torch.no_grad()
def greedy(model: Any, prompt: list[int]) -> tuple[list[int], float, list[float]]:
    """The ids after a prompt, the least margin between the best two logits, and four numbers of the last logits."""
    ids = list(prompt)
    margin = float("inf")
    for _ in range(NEW):
        logits = model(torch.tensor([ids]), use_cache=False).logits[0, -1].float()
        best = logits.topk(2).values
        margin = min(margin, float(best[0] - best[1]))
        ids.append(int(logits.argmax()))
    last = [float(logits[0]), float(logits[-1]), float(logits.max()), float(logits.abs().mean())]
    return ids[len(prompt) :], margin, [round(number, 4) for number in last]


def record(made: Directory) -> dict[str, Any]:
    """The result of one directory."""
    with tempfile.TemporaryDirectory() as folder:
        made.write(Path(folder))
        signal.alarm(SECONDS)
        try:
            load = transformers.AutoModelForCausalLM.from_pretrained
            model, info = load(
                folder, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
            )
            model.eval()
            for attempt in range(20):
                ids, margin, last = greedy(model, made.prompt(attempt))
                if margin > MARGIN:
                    break
        except Exception as error:
            return {"refused": f"{type(error).__name__}: {' '.join(str(error).split())}"[:110]}
        finally:
            signal.alarm(0)
    ends = model.generation_config.eos_token_id
    ends = [] if ends is None else ends if isinstance(ends, list) else [ends]
    result: dict[str, Any] = {"ids": ids, "prompt": attempt, "logits": last, "ends": ends}
    if margin <= MARGIN:
        result["margin"] = margin
    if info["missing_keys"]:
        result["missing"] = len(info["missing_keys"])  # transformers invented these weights
    return result


def too_long(number: int, frame: object) -> None:
    """Stop a directory without an end."""
    raise TimeoutError(f"more than {SECONDS} s")


def main() -> int:
    """Write the record, with one line per directory."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=Path("tests/fixtures/configs/transformers.json")
    )
    parser.add_argument("--number", type=int, default=200, help="directories of each family")
    args = parser.parse_args()
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, too_long)
    lines = [json.dumps({"transformers": transformers.__version__, "torch": torch.__version__})]
    for family in FAMILIES:
        for number in range(args.number):
            made = directory(family, number)
            lines.append(
                json.dumps(
                    {"family": family, "number": number, "digest": made.digest, **record(made)}
                )
            )
    args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
