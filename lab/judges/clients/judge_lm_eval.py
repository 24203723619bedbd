"""lm-eval: compares loglikelihoods from `local-completions` with transformers' on the same random weights.

    judge_lm_eval.py --make FOLDER      writes the model: a small Llama with a byte-level tokenizer
    judge_lm_eval.py --url ... --model FOLDER ...

Downloads nothing: weights are random, the tokenizer is trained on the lines below, and the tasks are files.
"""

import json
import math
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from lab.judges.clients import checks
from lab.judges.clients.checks import Settings, expect

# Both sides compute in float32, in different orders. Sums of up to 100 log probabilities agree this closely.
TOLERANCE = 2e-5  # relative to the size of the sum, and absolute below 1
MAX_LENGTH = 256
END = "<|end|>"
CONTEXTS = "contexts.json"  # beside the model: texts, and its greedy continuation of each
LINES = [
    "The river runs past the mill and under the old bridge.",
    "In winter the ice is thick enough to walk on; children skate there.",
    "A boat with a red sail came up from the sea, and its crew sang an old song.",
    "Straße, naïve, 日本語 and 🙂 are more than one byte a letter.",
]
WORDS = ["the mill", "the old bridge", "a red sail", " ", "日本", "its crew sang an old song."]

MULTIPLE_CHOICE = """
task: choices
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""
ROLLING = """
task: rolling
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: bits_per_byte}}]
"""


def make(folder: Path) -> None:
    """Write the model's directory."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=[END], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(LINES, trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, bos_token=END
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_LENGTH,
        initializer_range=0.2,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    contexts = json.dumps(list(greedy_choices(model, tokenizer)))
    (folder / CONTEXTS).write_text(contexts, encoding="utf-8")


def greedy_choices(model: Any, tokenizer: Any) -> Iterator[tuple[str, str]]:
    """For each line, a beginning and its most probable next token as text. Skips tokens that are not text alone."""
    for line in LINES:
        for length in range(5, len(line)):
            ids = tokenizer.encode(line[:length]).ids
            best = int(
                model(model.dummy_inputs["input_ids"].new_tensor([ids])).logits[0, -1].argmax()
            )
            text = tokenizer.decode([best])
            if text.strip().isprintable() and tokenizer.encode(line[:length] + text).ids == [
                *ids,
                best,
            ]:
                yield line[:length], text
                break


def write_tasks(folder: Path, model: Path) -> None:
    """Write two tasks over files: choices after a context, and whole texts."""
    contexts = json.loads((model / CONTEXTS).read_text(encoding="utf-8"))
    questions = [
        {"question": text, "choices": [*WORDS, best], "answer": 0} for text, best in contexts
    ]
    # the last one takes several windows
    texts = [{"text": line} for line in [*LINES, " ".join(LINES * 6)]]
    for name, rows, template in (
        ("choices", questions, MULTIPLE_CHOICE),
        ("rolling", texts, ROLLING),
    ):
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        (folder / f"{name}.yaml").write_text(template.format(data=data), encoding="utf-8")


class Subject:
    """The answers of both models to both tasks, in the same order."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self.settings = settings
        ours = {
            "model": settings.model,
            "base_url": f"{settings.url}/v1/completions",
            "tokenizer": settings.model,
            "tokenizer_backend": "huggingface",
            "tokenized_requests": True,
            "num_concurrent": 4,
            "max_retries": 1,
            "max_length": MAX_LENGTH,
        }
        # The other side reserves a token of its context for an answer, and one for the beginning.
        theirs = {
            "pretrained": settings.model,
            "dtype": "float32",
            "max_length": MAX_LENGTH - 2,
            "device": "cpu",
        }
        self.ours = evaluate("local-completions", ours, folder)
        self.theirs = evaluate("hf", theirs, folder)

    def pairs(self, task: str) -> Iterator[tuple[Any, Any]]:
        """The answers of the server and of transformers, for every request of a task."""
        ours = responses(self.ours, task)
        theirs = responses(self.theirs, task)
        expect(len(ours) == len(theirs) > 0, f"{len(ours)} and {len(theirs)} answers")
        return zip(ours, theirs, strict=True)


def evaluate(model: str, arguments: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Run lm-eval; returns its results with every sample."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    outcome: dict[str, Any] = lm_eval.simple_evaluate(
        model=model,
        model_args=arguments,
        tasks=["choices", "rolling"],
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        batch_size=4,
        log_samples=True,
        bootstrap_iters=0,
    )
    return outcome


def responses(outcome: dict[str, Any], task: str) -> list[Any]:
    """The model's answer to each request: (loglikelihood, True if greedy), or a loglikelihood alone."""
    samples = sorted(outcome["samples"][task], key=lambda sample: sample["doc_id"])
    return list(chain.from_iterable(sample["filtered_resps"] for sample in samples))


def near(a: float, b: float) -> bool:
    """True if both are equal within the tolerance."""
    return math.isfinite(a) and abs(a - b) <= TOLERANCE * max(1.0, abs(b))


def check_sums(pairs: Sequence[tuple[float, float]]) -> None:
    """Check that the sums of each pair are near, and print the greatest difference."""
    worst = max(abs(ours - theirs) / max(1.0, abs(theirs)) for ours, theirs in pairs)
    print(f"{len(pairs)} loglikelihoods, at most {worst:.1e} of the sum apart", file=sys.stderr)
    for ours, theirs in pairs:
        expect(near(ours, theirs), f"{ours} here, {theirs} from transformers")


def loglikelihoods_equal(s: Subject) -> None:
    check_sums([(float(ours), float(theirs)) for (ours, _), (theirs, _) in s.pairs("choices")])


def greediness_equal(s: Subject) -> None:
    pairs = [(ours, theirs) for (_, ours), (_, theirs) in s.pairs("choices")]
    expect({theirs for _, theirs in pairs} == {True, False}, "the task has choices of both kinds")
    for ours, theirs in pairs:
        expect(ours == theirs, f"greedy: {ours} here, {theirs} from transformers")


def rolling_loglikelihoods_equal(s: Subject) -> None:
    check_sums([(float(ours), float(theirs)) for ours, theirs in s.pairs("rolling")])


def metrics_equal(s: Subject) -> None:
    for task, metric in (("choices", "acc,none"), ("rolling", "bits_per_byte,none")):
        ours, theirs = (float(side["results"][task][metric]) for side in (s.ours, s.theirs))
        expect(near(ours, theirs), f"{metric} of {task}: {ours} here, {theirs} from transformers")


CHECKS = [loglikelihoods_equal, greediness_equal, rolling_loglikelihoods_equal, metrics_equal]


def main() -> int:
    """Write the model, or run the checks."""
    if sys.argv[1:2] == ["--make"]:
        make(Path(sys.argv[2]))
        return 0
    settings = checks.settings(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        write_tasks(Path(folder), Path(settings.model))
        subject = Subject(settings, Path(folder))
    return checks.run(CHECKS, subject, ["lm-eval", "transformers", "torch"], settings.report)


if __name__ == "__main__":
    sys.exit(main())
