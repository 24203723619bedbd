"""Creates the adapters of the tests that compare with PEFT, or verifies the existing ones.

    python scripts/make_adapters.py [--verify] [--out tests/fixtures/adapters] [NAME ...]

Needs torch, transformers, peft and safetensors, in an environment of their own. Each folder is written by PEFT's
`save_pretrained`, for a model of tests/fixtures/reference, with random matrices. `expected.npz` has for the prompts of
the model the logits of every position in float32, and the ids generated greedily, with a margin as in
`make_reference.py`.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import peft
import torch
import transformers

REFERENCE = Path("tests/fixtures/reference")
MARGIN = 2e-3
TOLERANCE = 2e-5
NUM_PROMPTS = 4
NEW_TOKENS = 12


class Case(NamedTuple):
    """An adapter: its model, and its configuration."""

    model: str
    options: Mapping[str, Any]


CASES: Mapping[str, Case] = {
    "gpt2-attention": Case("gpt2-12-heads", {"r": 4, "lora_alpha": 8, "target_modules": ["c_attn"]}),
    "gpt2-all": Case("gpt2-12-heads", {"r": 2, "lora_alpha": 3, "target_modules": ["c_attn", "c_proj", "c_fc"]}),
    "llama-some": Case("llama-12-heads-3-groups", {"r": 3, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj"]}),
    "llama-all": Case("llama-12-heads-3-groups", {"r": 4, "lora_alpha": 5, "target_modules": "all-linear"}),
    "llama-stabilised": Case(
        "llama-12-heads-3-groups",
        {"r": 4, "lora_alpha": 2, "target_modules": ["o_proj", "down_proj"], "use_rslora": True},
    ),
    "phi3-joined": Case("phi3-window", {"r": 2, "lora_alpha": 4, "target_modules": ["qkv_proj", "gate_up_proj"]}),
    "gpt_neox-heads": Case(
        "gpt_neox-parallel", {"r": 2, "lora_alpha": 4, "target_modules": ["query_key_value", "dense_h_to_4h"]}
    ),
    "opt-all": Case("opt", {"r": 2, "lora_alpha": 2, "target_modules": "all-linear"}),
}


def build(case: Case, seed: int) -> Any:
    """The model with an adapter of random matrices."""
    torch.manual_seed(seed)
    base = transformers.AutoModelForCausalLM.from_pretrained(REFERENCE / case.model, attn_implementation="eager")
    model = peft.get_peft_model(base, peft.LoraConfig(**case.options, task_type="CAUSAL_LM")).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.3 * torch.randn_like(parameter))
    return model


@torch.no_grad()
def expect(model: Any, case: Case) -> dict[str, np.ndarray]:
    """The results for the prompts of the model, and the least margin in greedy generation."""
    prompts = np.load(REFERENCE / case.model / "expected.npz")
    expected: dict[str, np.ndarray] = {}
    margins = []
    for number in range(NUM_PROMPTS):
        ids = prompts[f"ids_{number}"]
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
        expected[f"logits_{number}"] = model(prompt).logits[0].float().numpy()
        expected[f"greedy_{number}"] = out.sequences[0, len(ids) :].numpy().astype(np.int32)
    return {**expected, "margin": np.asarray(min(margins), np.float32)}


def make(name: str, directory: Path) -> None:
    """Try seeds until the margins are wide, then write the adapter."""
    case = CASES[name]
    for seed in range(1000):
        model = build(case, seed)
        expected = expect(model, case)
        if expected["margin"] > MARGIN:
            break
    else:
        raise SystemExit(f"{name}: no seed gives margins above {MARGIN}")
    shutil.rmtree(directory, ignore_errors=True)
    model.save_pretrained(directory)
    (directory / "README.md").unlink(missing_ok=True)
    path = directory / "adapter_config.json"
    values = json.loads(path.read_text(encoding="utf-8")) | {"base_model_name_or_path": case.model}
    path.write_text(json.dumps(values, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    np.savez_compressed(directory / "expected.npz", **expected)
    print(f"{name}: seed {seed}, margin {expected['margin']:.4f}")


def verify(name: str, directory: Path) -> bool:
    """Read the adapter back, run it on the same prompts, and compare."""
    case = CASES[name]
    base = transformers.AutoModelForCausalLM.from_pretrained(REFERENCE / case.model, attn_implementation="eager")
    found, stored = (
        expect(peft.PeftModel.from_pretrained(base, directory).eval(), case),
        np.load(directory / "expected.npz"),
    )
    worst, same = 0.0, True
    for number in range(NUM_PROMPTS):
        logits = stored[f"logits_{number}"]
        worst = max(worst, float(np.abs(found[f"logits_{number}"] - logits).max() / np.abs(logits).max()))
        same &= np.array_equal(found[f"greedy_{number}"], stored[f"greedy_{number}"])
    holds = same and worst <= TOLERANCE
    print(f"{name}: {'ok' if holds else 'DIFFERS'}, logits within {worst:.1e}")
    return holds


def main() -> int:
    """Make or verify all cases; 1 if one differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--verify", action="store_true", help="compare the existing adapters, write nothing")
    parser.add_argument("names", nargs="*", metavar="NAME", help="cases to make or verify; default: all")
    parser.add_argument("--out", type=Path, default=Path("tests/fixtures/adapters"))
    args = parser.parse_args()
    names = args.names or list(CASES)
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    if args.verify:
        return 0 if all([verify(name, args.out / name) for name in names]) else 1
    for name in names:
        make(name, args.out / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
