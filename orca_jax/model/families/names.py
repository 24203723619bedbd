"""The names of a family's tensors: lines of text, each with a tensor of a checkpoint and our parameter.

    self_attn.{q,k,v,o}_proj    attention.{query,key,value,out}
    mlp.gate_up_proj            mlp.{gate,up}

Names in a layer are below that of "blocks". Choices in braces are taken one by one; several parameters of one name
share a tensor, in the order of `parameters.py`. Suffixes such as ".weight" follow from the kind of a parameter, but a
name with "[{expert}]" is whole. Marks at the end of a line:

- `or`: another name, in files without the first one.
- `by=heads` or `kv_heads`, `key_heads`, `columns`: the columns of a shared tensor take turns, in groups of this number.
- `pairs`: rotated columns lie side by side in pairs.
- `in_out`: the matrix is stored as [in, out].
- `row`: the vector is stored as a matrix of one row.
- `skips=N`: the parameter begins after N rows.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

_CHOICES = re.compile(r"\{([^{}]*,[^{}]*)\}")


class TensorName(NamedTuple):
    """The tensor of a parameter: its names in files, and the marks of its line."""

    keys: tuple[str, ...]
    by: str = ""
    pairs: bool = False
    in_out: bool = False
    row: bool = False
    skips: int = 0


TensorNames = Mapping[str, TensorName]
"""The tensors by our parameters."""


def names(text: str) -> TensorNames:
    """The names of a text's lines, of which a later one replaces an earlier one of the same parameter."""
    found: dict[str, TensorName] = {}
    for line in filter(str.strip, text.splitlines()):
        theirs, ours, *marks = line.split()
        parameters = _choices(ours)
        keys = _choices(theirs)
        if len(keys) == 1:
            keys *= len(parameters)
        for key, parameter in zip(keys, parameters, strict=True):
            if "or" in marks:
                earlier = found[parameter]
                found[parameter] = earlier._replace(keys=(*earlier.keys, key))
            else:
                found[parameter] = TensorName((key,), **dict(map(_mark, marks)))
    return found


def _choices(text: str) -> list[str]:
    """The texts with each of the choices in braces; braces without a comma are left."""
    found = _CHOICES.search(text)
    if found is None:
        return [text]
    return [text[: found.start()] + each + text[found.end() :] for each in found[1].split(",")]


def _mark(mark: str) -> tuple[str, Any]:
    """The field of a mark, and its value."""
    field, _, value = mark.partition("=")
    if not value:
        return field, True
    if field == "skips":
        return field, int(value)
    return field, value


LLAMA = """
    embed_tokens                embedding
    norm                        final_norm
    lm_head                     head
    lm_head.bias                head.bias
    layers.{layer}              blocks
    input_layernorm             attention_norm
    post_attention_layernorm    mlp_norm
    self_attn.{q,k,v,o}_proj    attention.{query,key,value,out}
    self_attn.{q,k}_norm        attention.{query,key}_norm
    mlp.{gate,up,down}_proj     mlp.{gate,up,down}
"""
"""The names that all families begin with."""

NEIGHBOURS = """
    self_attn.{q,k}_proj        attention.{query,key}    pairs
"""
"""Rotated pairs of neighbours, in families with Llama's names."""

JOINED_GATE = """
    mlp.gate_up_proj            mlp.{gate,up}
"""

POST_NORMS = """
    post_attention_layernorm     attention_norm
    post_feedforward_layernorm   mlp_norm
"""
"""Norms after both parts of a layer."""

BOTH_NORMS = """
    post_attention_layernorm     attention_out_norm
    pre_feedforward_layernorm    mlp_norm
    post_feedforward_layernorm   mlp_out_norm
"""
"""Norms before and after both parts of a layer."""

EXPERTS = """
    mlp.gate                                    experts.router
    mlp.experts.{expert}.{gate,up,down}_proj    experts.{gate,up,down}
"""
STACKED_EXPERTS = """
    mlp.gate                                    experts.router
    mlp.experts.{expert}.{gate,up,down}_proj    experts.{gate,up,down}
    mlp.experts.gate_up_proj[{expert}]          experts.{gate,up}       or
    mlp.experts.down_proj[{expert}]             experts.down            or
"""
"""Experts with tensors of their own; in other files all experts of a layer are in two."""

MIXTRAL = """
    block_sparse_moe.gate                           experts.router
    block_sparse_moe.experts.{expert}.{w1,w3,w2}    experts.{gate,up,down}
"""
SHARED_EXPERT = """
    mlp.shared_expert.{gate,up,down}_proj       shared.{gate,up,down}
    mlp.shared_expert_gate                      shared.weight
"""
"""The expert of all tokens of Qwen."""

SHARED_EXPERTS = """
    mlp.shared_experts.{gate,up,down}_proj      shared.{gate,up,down}
"""

SIGMOID = f"""
    {STACKED_EXPERTS}
    {SHARED_EXPERTS}
    mlp.gate.e_score_correction_bias            experts.choice_bias
"""
"""Experts chosen by sigmoid scores, as in DeepSeek-V3."""


def mamba(key: str) -> str:
    """The lines of Mamba-2, whose tensors are below `key`."""
    return f"""
        {key}.in_proj           mamba.{{gate,value,key,step}}
        {key}.conv1d            mamba.{{taps,key_taps}}
        {key}.conv1d.bias       mamba.{{bias,key_bias}}
        {key}.A_log             mamba.rate
        {key}.dt_bias           mamba.step_bias
        {key}.D                 mamba.skip
        {key}.norm.weight       mamba.norm
        {key}.out_proj          mamba.out
    """


BAMBA = f"""
    {mamba("mamba")}
    final_layernorm                     final_norm
    pre_ff_layernorm                    mlp_norm
    feed_forward.{{gate,up,down}}_proj  mlp.{{gate,up,down}}
"""
