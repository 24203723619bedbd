"""Runs a workload with eSurge, the engine of EasyDeL on JAX, on the CPU.

    python -m lab peers --peer easydel

runs this program beside the engine, in an environment that it makes. By hand:

    python -m lab peers --write INPUTS
    pip install torch==2.13.0+cpu easydel==0.3.0 pillow
    python -m lab.peers.programs.easydel_offline --workload INPUTS/workload.json --model INPUTS/model --dtype float32

Use a separate environment with Python 3.11 or later: EasyDeL pins an earlier JAX. It reads the weights through PyTorch.

Requests generate greedily, and no token ends one. Prompts are ids: this program replaces the engine's tokenizer step,
since `generate` takes text alone. Attention is `ragged_page_attention_v2`: with the default, version 3, GPT-2 fails on
a CPU ("cannot reshape array of shape (768, 2, 128)"). The engine compiles for each bucket of tokens at its start, which
takes minutes. Prefix caching is off.
"""

import argparse
import itertools
import os
from collections.abc import Sequence
from typing import Any

from lab.peers.programs.common import Request, arguments, parse, run


class Engine:
    """The engine, with prompts of ids under names."""

    def __init__(self, args: argparse.Namespace) -> None:
        """Load the model and compile."""
        os.environ["JAX_PLATFORMS"] = "cpu"
        import easydel
        import jax.numpy as jnp
        from transformers import AutoTokenizer

        dtype = getattr(jnp, args.dtype)
        model = easydel.AutoEasyDeLModelForCausalLM.from_pretrained(
            args.model, dtype=dtype, param_dtype=dtype, from_torch=True, sharding_axis_dims=(1, 1, 1, 1, 1),
            config_kwargs={"attn_mechanism": "ragged_page_attention_v2", "num_key_value_heads": _heads(args.model)},
        )  # fmt: skip
        self._requests: dict[str, Request] = {}
        self._numbers = itertools.count()
        self._engine: Any = easydel.eSurge(
            model=model, tokenizer=AutoTokenizer.from_pretrained(args.model), dtype=dtype, max_model_len=args.context,
            max_num_seqs=args.max_num_seqs, max_num_batched_tokens=args.max_num_batched_tokens,
            enable_prefix_caching=False, hbm_utilization=args.memory_share, silent_mode=True,
            sampling_params_callback=self._with_length,
        )  # fmt: skip
        self._engine._tokenize_prompt = lambda _, prompt: self._requests[prompt].prompt_ids
        self._params = easydel.SamplingParams(
            max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False
        )

    def generate(self, requests: Sequence[Request]) -> list[int]:
        """Run the requests to their ends; returns the number of tokens of each."""
        self._requests = {str(next(self._numbers)): request for request in requests}
        outputs = self._engine.generate(list(self._requests), self._params, use_tqdm=False)
        counts = {output.prompt: len(output.outputs[0].token_ids) for output in outputs}
        return [counts[name] for name in self._requests]

    def _with_length(self, params: Any, about: dict[str, Any]) -> Any:
        params.max_tokens = self._requests[about["prompt"]].num_output
        return params


def _heads(model: str) -> int:
    from transformers import AutoConfig

    return int(AutoConfig.from_pretrained(model).num_attention_heads)


def main() -> None:
    """Load the model and run the passes."""
    parser = arguments(__doc__, ("ragged",))
    parser.add_argument(
        "--context",
        type=int,
        default=1024,
        metavar="N",
        help="most tokens of a request (default: 1024)",
    )
    parser.add_argument(
        "--max-num-batched-tokens",
        type=int,
        default=512,
        metavar="N",
        help="tokens of an iteration (default: 512)",
    )
    parser.add_argument(
        "--memory-share",
        type=float,
        default=0.2,
        metavar="X",
        help="share of memory for the KV cache (default: 0.2)",
    )
    args = parse(parser)
    run(
        args,
        Engine(args).generate,
        ("easydel", "jax", "jaxlib"),
        {"attention": "ragged_page_attention_v2"},
    )


if __name__ == "__main__":
    main()
