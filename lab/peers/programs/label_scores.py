"""The log probabilities of labels by transformers, in an environment of its own: for `lab/decisions/reference.py`.

    python label_scores.py FILE < calls.json > scores.json

FILE is a GGUF file, dequantised to float32. Each question has a prompt and labels, in ids; its answer is the log
probability of each label after the prompt, the sum over its tokens, in float64.
"""

import copy
import json
import sys
from pathlib import Path

import torch
import transformers


@torch.no_grad()
def scores(model: torch.nn.Module, prompt: list[int], labels: list[list[int]]) -> list[float]:
    """The log probability of each label. Tokens behind the first one continue a copy of the prompt's cache."""
    out = model(torch.tensor([prompt]), use_cache=True)
    first = torch.log_softmax(out.logits[0, -1].double(), -1)
    found = []
    for label in labels:
        total = float(first[label[0]])
        if len(label) > 1:
            cache = copy.deepcopy(out.past_key_values)
            further = model(torch.tensor([label[:-1]]), past_key_values=cache).logits[0]
            logprobs = torch.log_softmax(further.double(), -1)
            total += float(logprobs[range(len(label) - 1), label[1:]].sum())
        found.append(total)
    return found


def main() -> None:
    """Read the questions, and write their scores."""
    path = Path(sys.argv[1])
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    model.eval()
    torch.set_num_threads(2)
    questions = json.load(sys.stdin)
    found = [scores(model, each["prompt"], each["labels"]) for each in questions]
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    json.dump({"versions": versions, "scores": found}, sys.stdout)


if __name__ == "__main__":
    main()
