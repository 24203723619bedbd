"""Greedy tokens of the record in one run of an engine, with chunks, preemption and prefix reuse, on several meshes."""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

from orca_jax.model.describe import config_from_hf
from orca_jax.values.request import SamplingParams
from tests.covering import chosen
from tests.model.recorded.record import NEW, PROMPT, load, names
from tests.test_same_tokens import make_engine

pytestmark = [
    pytest.mark.usefixtures("compiled_when_used", "few_programs", "quick_compiles"),
    pytest.mark.slow,
]

OF_PARTS = ("smollm3", "qwen3_vl", "ernie4_5_moe", "gpt_oss", "phi")
WITHOUT_STAGES = ("gemma4_text",)  # layers share keys
MESHES = {**dict.fromkeys(OF_PARTS, ((2, 1), (1, 2))), **dict.fromkeys(WITHOUT_STAGES, ((2, 1),))}
NUM_PAGES = {"afmoe": 32, "flint": 50}  # more layers keep pages
OF_MESHES = [(name, *sizes) for name, meshes in MESHES.items() for sizes in meshes]


def parts(value: Any) -> Iterator[tuple[str, Hashable]]:
    """Names and values of a configuration's fields; of numbers and tables alone whether they are there."""
    for field in fields(value):
        found = getattr(value, field.name)
        if is_dataclass(found):
            yield from ((f"{field.name}.{name}", part) for name, part in parts(found))
        elif field.name not in ("family", "text_family"):
            yield field.name, found if isinstance(found, (bool, str)) else found is None


def has_parts(families: Sequence[str]) -> list[str]:
    """Families that have each value of each field: logits of all families are compared in test_recorded.py."""
    missing = {name: {*parts(config_from_hf(load(name)[0].config))} for name in families}
    found = []
    while any(missing.values()):
        found.append(max(missing, key=lambda name: len(missing[name])))
        shown = missing.pop(found[-1])
        missing = {name: values - shown for name, values in missing.items()}
    return found


CASES = [(name, 1, 1) for name in has_parts(names()) if name not in MESHES]
CASES += chosen(OF_MESHES, lambda case: (case[0], case[1:]), 1)


@pytest.mark.parametrize(("family", "tensor_parallel", "stages"), CASES)
def test_greedy_tokens_equal_transformers(
    family: str, tensor_parallel: int, stages: int, tmp_path: Path
) -> None:
    model = load(family)[0]
    model.write(tmp_path)
    settings = {
        "pipeline_parallel_size": stages,
        "page_size": 4,
        # two requests need more, and the third begins with pages of the first
        "num_pages": NUM_PAGES.get(family, 26),
        "max_num_batched_tokens": 8,
    }
    prompt, answer = tuple(model.ids[:PROMPT].tolist()), model.ids[PROMPT:].tolist()
    params = SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True)
    tokens: dict[str, list[int]] = {}
    for engine in make_engine(str(tmp_path), None, tensor_parallel, "chunked", **settings):
        for number in range(4):
            # The first ids differ, so that only every other prompt begins with pages of another.
            engine.add_request(str(number), prompt if number % 2 == 0 else prompt[5:], params)
            tokens[str(number)] = []
        while engine.has_work:
            for update in engine.step():
                tokens[update.request_id] += update.new_ids
    assert tokens["0"] == tokens["2"] == answer
    assert tokens["1"] == tokens["3"] and len(tokens["1"]) == NEW
