"""The log probabilities of labels by transformers, in an environment of its own: a child of `reference.py`.

    python reference_child.py FILE < calls.json > scores.json

FILE is a GGUF file, dequantised to float32. Each question has a prompt and labels, in ids; its answer is the log
probability of each label after the prompt, the sum over its tokens, in float64.
"""

import json
import sys
from pathlib import Path

import torch
import transformers


@torch.no_grad()
def scores(model: torch.nn.Module, prompt: list[int], labels: list[list[int]]) -> list[float]:
    """The log probability of each label."""
    found = []
    known: dict[tuple[int, ...], torch.Tensor] = {}
    for label in labels:
        total = 0.0
        for end, token in enumerate(label):
            begun = tuple(label[:end])
            if begun not in known:
                logits = model(torch.tensor([[*prompt, *begun]])).logits[0, -1]
                known[begun] = torch.log_softmax(logits.double(), -1)
            total += float(known[begun][token])
        found.append(total)
    return found


def main() -> None:
    """Read the questions, and write their scores."""
    path = Path(sys.argv[1])
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    model.eval()
    questions = json.load(sys.stdin)
    found = [scores(model, each["prompt"], each["labels"]) for each in questions]
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    json.dump({"versions": versions, "scores": found}, sys.stdout)


if __name__ == "__main__":
    main()
