"""`LLM` on the toy model: vLLM's shapes, order, abandoned iterators, and errors that leave the engine clean."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from orca_jax import LLM, SamplingParams
from orca_jax.errors import ConfigError, EngineError, RequestError
from orca_jax.sim.toy import toy_generate

TOY = "preset:toy"


@pytest.fixture
def llm() -> Iterator[LLM]:
    with LLM(model=TOY, max_num_seqs=4, max_model_len=4096, page_size=16) as made:
        free_pages = made.engine.stats.free_pages
        yield made
        made.engine.pool.check_integrity()
        stats = made.engine.stats
        assert (stats.running, stats.waiting, stats.in_flight, stats.free_pages) == (0, 0, 0, free_pages)
        assert not made.engine.has_work


def oracle(prompt: str | list[int], params: SamplingParams) -> tuple[int, ...]:
    ids = list(prompt.encode()) if isinstance(prompt, str) else prompt
    return tuple(toy_generate(ids, params, vocab_size=257, eos_token_ids=(256,)))


def params_of(max_tokens: int, **fields: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0, **fields)


def test_outputs_are_in_the_prompts_order(llm: LLM) -> None:
    prompts: list[str | list[int]] = ["a", [1, 2, 3], "ccc", "d" * 50, [9], "f"]
    each = [params_of(n) for n in (30, 2, 17, 1, 25, 8)]
    outputs = llm.generate(prompts, each, use_tqdm=False)
    assert [output.prompt for output in outputs] == ["a", None, "ccc", "d" * 50, None, "f"]
    for prompt, params, output in zip(prompts, each, outputs, strict=True):
        (completion,) = output.outputs
        assert completion.token_ids == oracle(prompt, params)
        assert completion.text == llm.tokenizer.decode(completion.token_ids)
        assert (completion.index, completion.finish_reason, output.finished) == (0, "length", True)
        assert output.prompt_token_ids == tuple(prompt.encode() if isinstance(prompt, str) else prompt)
        assert output.metrics is not None and output.metrics.arrival <= output.metrics.finished


def test_end_tokens_are_ids_and_not_text(llm: LLM) -> None:
    whole = oracle("stop", params_of(20))
    (output,) = llm.generate("stop", params_of(20, stop_token_ids=(whole[7],)), use_tqdm=False)
    ids = output.outputs[0].token_ids
    assert ids == whole[: whole.index(whole[7]) + 1] and output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].text == llm.tokenizer.decode(ids[:-1])


def test_one_prompt_alone_none_at_all_and_defaults(llm: LLM) -> None:
    assert len(llm.generate("text", use_tqdm=False)) == 1
    assert llm.generate([5, 6, 7], params_of(3), use_tqdm=False)[0].prompt_token_ids == (5, 6, 7)
    assert llm.generate([], use_tqdm=False) == []
    assert len(llm.generate("x", SamplingParams(ignore_eos=True), use_tqdm=False)[0].outputs[0].token_ids) == 16


def test_stream_yields_in_the_order_of_finishing(llm: LLM) -> None:
    each = [params_of(n) for n in (40, 3, 20)]
    outputs = list(llm.stream(["slow", "fast", "middle"], each))
    assert [output.prompt for output in outputs] == ["fast", "middle", "slow"]


def test_abandoned_streams_end(llm: LLM) -> None:
    for output in llm.stream(["a", "b", "c", "d", "e", "f"], [params_of(2), *[params_of(3000)] * 5]):
        assert output.prompt == "a"
        break
    assert not llm.engine.has_work, "dropped in the middle"
    llm.stream(["a", "b"], params_of(3000))
    assert not llm.engine.has_work, "dropped before its first output"


def test_interleaved_calls_keep_their_outputs(llm: LLM) -> None:
    first = llm.stream(["a", "b", "c"], [params_of(5), params_of(6), params_of(60)])
    assert next(first).prompt == "a"
    assert llm.generate("other", params_of(20), use_tqdm=False)[0].outputs[0].token_ids == oracle(
        "other", params_of(20)
    )
    assert [output.prompt for output in first] == ["b", "c"]


@pytest.mark.parametrize(
    ("prompts", "params", "param"),
    [
        (["fine", ""], None, "prompts[1]"),
        (["fine", []], None, "prompts[1]"),
        (["fine", [1, 257]], None, "prompts[1]"),
        (["fine", [1, "x"]], None, "prompts[1]"),
        (["fine", None], None, "prompts[1]"),
        (["fine", b"bytes"], None, "prompts[1]"),
        ([[1], 2, "fine"], None, "prompts[1]"),
        (["fine", "half \ud800"], None, "prompts[1]"),
        (["fine", "x" * 5000], None, "prompts[1]"),
        (["fine", "fine"], [params_of(1), params_of(4096)], "prompts[1]"),
        (["fine", "fine"], [params_of(1)], "sampling_params"),
    ],
)
def test_a_bad_prompt_is_named_and_nothing_runs(llm: LLM, prompts: Any, params: Any, param: str) -> None:
    for call in (llm.generate, llm.stream):
        with pytest.raises(RequestError) as caught:
            call(prompts, params)
        assert caught.value.param == param and param in caught.value.message
    assert llm.engine.stats.iterations == 0
    assert len(llm.generate("still works", use_tqdm=False)) == 1


def test_progress_bar(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["a", "b"], params_of(3), use_tqdm=True)
    assert "2/2" in capsys.readouterr().err
    llm.generate(["a", "b"], params_of(3), use_tqdm=False)
    assert capsys.readouterr().err == ""


def test_ctrl_c_leaves_it_usable(llm: LLM) -> None:
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b"], params_of(4000), use_tqdm=False)
    timer.join()
    assert llm.generate("a", params_of(4), use_tqdm=False)[0].outputs[0].token_ids == oracle("a", params_of(4))


def test_a_failed_iteration_is_final() -> None:
    llm = LLM(model=TOY)

    def fail(plan: object) -> Any:
        raise ValueError("the device is gone")

    llm.engine.executor.submit = fail  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="device is gone"):
        llm.generate("a", use_tqdm=False)
    with pytest.raises(EngineError, match="device is gone"):
        llm.generate("a", use_tqdm=False)


def test_closed() -> None:
    with LLM(model=TOY) as llm:
        rest = llm.stream(["a", "b"], params_of(3000))
    llm.close()
    with pytest.raises(EngineError, match="closed"):
        llm.generate("a")
    with pytest.raises(EngineError, match="closed"):
        next(rest)


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match="did you mean max_num_seqs") as caught:
        LLM(model=TOY, max_num_seq=3)
    assert caught.value.param == "max_num_seq"
    with pytest.raises(ConfigError):
        LLM(model=TOY, max_num_seqs=0)


def test_importing_the_package_loads_no_jax() -> None:
    code = (
        "import sys, orca_jax; orca_jax.SamplingParams();"
        "assert 'jax' not in sys.modules and 'orca_jax.llm' not in sys.modules;"
        "from orca_jax import LLM; LLM(model='preset:toy').close(); assert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
