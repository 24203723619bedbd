"""Creates the adapters of the tests that compare with PEFT, or verifies the existing ones.

    python scripts/make_adapters.py [--verify] [--out tests/fixtures/adapters] [NAME ...]

Needs torch, transformers, peft and safetensors, in an environment of their own. Each folder is written by PEFT's
`save_pretrained`, for a model of tests/fixtures/reference, with random matrices. `expected.npz` has the answers to the
prompts of the model (recorded_answers.py).
"""

import json
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import peft
import torch

from recorded_answers import answers, is_same, make_parser, read_model, read_prompts, record, run

REFERENCE = Path("tests/fixtures/reference")
MARGIN = 2e-3


class Case(NamedTuple):
    """An adapter: its model, and its configuration."""

    model: str
    options: Mapping[str, Any]


CASES: Mapping[str, Case] = {
    "gpt2-attention": Case(
        "gpt2-12-heads", {"r": 4, "lora_alpha": 8, "target_modules": ["c_attn"]}
    ),
    "gpt2-all": Case(
        "gpt2-12-heads", {"r": 2, "lora_alpha": 3, "target_modules": ["c_attn", "c_proj", "c_fc"]}
    ),
    "llama-some": Case(
        "llama-12-heads-3-groups", {"r": 3, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj"]}
    ),
    "llama-all": Case(
        "llama-12-heads-3-groups", {"r": 4, "lora_alpha": 5, "target_modules": "all-linear"}
    ),
    "llama-stabilised": Case(
        "llama-12-heads-3-groups",
        {"r": 4, "lora_alpha": 2, "target_modules": ["o_proj", "down_proj"], "use_rslora": True},
    ),
    "phi3-joined": Case(
        "phi3-window", {"r": 2, "lora_alpha": 4, "target_modules": ["qkv_proj", "gate_up_proj"]}
    ),
    "gpt_neox-heads": Case(
        "gpt_neox-parallel",
        {"r": 2, "lora_alpha": 4, "target_modules": ["query_key_value", "dense_h_to_4h"]},
    ),
    "opt-all": Case("opt", {"r": 2, "lora_alpha": 2, "target_modules": "all-linear"}),
}


def build(case: Case, seed: int) -> Any:
    """The model with an adapter of random matrices."""
    torch.manual_seed(seed)
    base = read_model(REFERENCE / case.model)
    model = peft.get_peft_model(base, peft.LoraConfig(**case.options, task_type="CAUSAL_LM")).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.3 * torch.randn_like(parameter))
    return model


def attempt(case: Case, seed: int) -> tuple[Any, dict[str, np.ndarray]]:
    """The model of a seed, and its answers to the prompts of the model."""
    model = build(case, seed)
    return model, answers(model, read_prompts(REFERENCE / case.model))


def save(model: Any, case: Case, directory: Path) -> None:
    """Write the adapter, with the name of its model instead of a path."""
    model.save_pretrained(directory)
    (directory / "README.md").unlink(missing_ok=True)
    path = directory / "adapter_config.json"
    values = json.loads(path.read_text(encoding="utf-8")) | {"base_model_name_or_path": case.model}
    path.write_text(json.dumps(values, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def make(name: str, directory: Path) -> None:
    """Write the adapter of the first seed with wide margins."""
    case = CASES[name]
    record(
        name,
        directory,
        partial(attempt, case),
        partial(save, case=case, directory=directory),
        MARGIN,
    )


def verify(name: str, directory: Path) -> bool:
    """Read the adapter back, run it on the same prompts, and compare."""
    folder = REFERENCE / CASES[name].model
    model = peft.PeftModel.from_pretrained(read_model(folder), directory).eval()
    return is_same(name, directory, answers(model, read_prompts(folder)))


if __name__ == "__main__":
    sys.exit(run(make_parser(__doc__, "tests/fixtures/adapters").parse_args(), CASES, make, verify))
