"""`LLM` on the toy model: vLLM's interface, order, abandoned iterators, and errors without effect on the engine."""

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orca_jax import LLM, SamplingParams
from orca_jax.llm.outputs import by_id
from orca_jax.text.tokenizer import ByteTokenizer
from orca_jax.text.work_threads import ENCODING, WorkThreads
from orca_jax.values.errors import ConfigError, EngineError, RequestError
from orca_jax.values.request import StructuredOutput
from orca_jax.values.step import SpannedPrompt, VectorSpan
from tests.sim.oracle import toy_generate, toy_score
from tests.text.hostile import PANICS, REASON, write_hostile_tokenizer

TOY = "preset:toy"


@pytest.fixture
def llm() -> Iterator[LLM]:
    with LLM(model=TOY, max_num_seqs=4, max_model_len=4096, page_size=16) as made:
        free_pages = made.engine.stats.free_pages
        yield made
        made.generate([], use_tqdm=False)  # a turn, which aborts dropped requests
        made.engine.pool.check_integrity()
        stats = made.engine.stats
        assert (stats.running, stats.waiting, stats.in_flight, stats.free_pages) == (
            0,
            0,
            0,
            free_pages,
        )
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
        assert output.prompt_token_ids == tuple(
            prompt.encode() if isinstance(prompt, str) else prompt
        )
        assert output.metrics is not None and output.metrics.arrival <= output.metrics.finished


def test_priorities() -> None:
    with LLM(model=TOY, max_num_seqs=1, scheduler="chunked", scheduling_policy="priority") as llm:
        outputs = llm.stream(["a", "b", "c"], params_of(2), priority=[3, 1, 2])
        assert [output.prompt for output in outputs] == ["b", "c", "a"]
        for wrong, hint in (
            ([1, 2], "2 priorities for 1 prompts"),
            ([101], "from -100 to 100"),
            ([0.5], "an integer"),
        ):
            with pytest.raises(RequestError, match=hint) as caught:
                llm.generate("a", priority=wrong)  # type: ignore[arg-type]
            assert caught.value.param == "priority"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scheduling_policy": "fair"}, "scheduling_policy reads tenant, which nothing fills"),
        (
            {"scheduler": "tests.policy.turns:Reading"},
            "scheduler reads deadline, program, tenant, tpot, ttft, weight, which nothing fills",
        ),
    ],
)
def test_what_no_argument_gives_is_an_error_at_load(settings: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        LLM(model=TOY, **settings)
    assert caught.value.param == next(iter(settings))


def test_priorities_need_the_priority_policy(llm: LLM) -> None:
    with pytest.raises(RequestError, match="scheduling_policy") as caught:
        llm.generate(["a", "b"], params_of(1), priority=[0, 1])
    assert caught.value.param == "priority"
    assert len(llm.generate(["a", "b"], params_of(1), use_tqdm=False, priority=[0, 0])) == 2


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
    assert (
        len(
            llm.generate("x", SamplingParams(ignore_eos=True), use_tqdm=False)[0]
            .outputs[0]
            .token_ids
        )
        == 16
    )


def test_prompts_as_dicts(llm: LLM) -> None:
    ids = tuple(b"dict")
    prompts = [
        {"prompt": "dict"},
        {"prompt_token_ids": list(ids)},
        {"prompt_token_ids": ids},
        "dict",
    ]
    outputs = llm.generate(prompts, params_of(5), use_tqdm=False)
    assert [output.prompt for output in outputs] == ["dict", None, None, "dict"]
    assert {output.prompt_token_ids for output in outputs} == {ids}
    assert {output.outputs[0].token_ids for output in outputs} == {oracle("dict", params_of(5))}
    assert "".join(llm.stream_text(prompts[0], params_of(5))) == outputs[0].outputs[0].text
    assert (
        len(llm.generate(prompts[1], params_of(1), use_tqdm=False))
        == len(llm.embed(prompts[0]))
        == 1
    )


def test_stream_yields_in_the_order_of_finishing(llm: LLM) -> None:
    each = [params_of(n) for n in (40, 3, 20)]
    outputs = list(llm.stream(["slow", "fast", "middle"], each))
    assert [output.prompt for output in outputs] == ["fast", "middle", "slow"]


def test_abandoned_streams_end(llm: LLM) -> None:
    for output in llm.stream(
        ["a", "b", "c", "d", "e", "f"], [params_of(2), *[params_of(3000)] * 5]
    ):
        assert output.prompt == "a"
        break
    assert len(llm.engine.pool) == 5, "dropped in the middle: noted"
    llm.stream(["a", "b"], params_of(3000))
    assert len(llm.engine.pool) == 2, (
        "dropped before its first output; the turn that added it has aborted the others"
    )
    llm.generate([], use_tqdm=False)
    assert not llm.engine.has_work


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
        (["fine", {"text": "x"}], None, "prompts[1]"),
        (["fine", {"prompt": [1]}], None, "prompts[1]"),
        (["fine", {"prompt": "x", "multi_modal_data": {}}], None, "prompts[1]"),
        ({}, None, "prompts[0]"),
        (["fine", "half \ud800"], None, "prompts[1]"),
        (["fine", "x" * 5000], None, "prompts[1]"),
        (["fine", "fine"], [params_of(1), params_of(4096)], "prompts[1]"),
        (["fine", "fine"], [params_of(1)], "sampling_params"),
    ],
)
def test_a_bad_prompt_is_named_and_nothing_runs(
    llm: LLM, prompts: Any, params: Any, param: str
) -> None:
    for call in (llm.generate, llm.stream):
        with pytest.raises(RequestError) as caught:
            call(prompts, params)
        assert caught.value.param == param and param in caught.value.message
    assert llm.engine.stats.iterations == 0
    assert len(llm.generate("still works", use_tqdm=False)) == 1


def test_spans_are_refused_by_the_family(llm: LLM) -> None:
    """Without spans it is a prompt like another one, alone and in a list."""
    ids = (1, 2, 3)
    spanned = SpannedPrompt(ids, (VectorSpan(0, 2, bytes(32), "image-1"),))
    for prompts, place in ((spanned, 0), ([spanned], 0), (["fine", spanned], 1)):
        with pytest.raises(RequestError, match="models of the family toy read ids alone") as caught:
            llm.generate(prompts, params_of(3), use_tqdm=False)
        assert caught.value.param == f"prompts[{place}]"
    outputs = llm.generate([SpannedPrompt(ids, ()), ids], params_of(3), use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == [ids, ids]
    assert outputs[0].outputs[0].token_ids == oracle([*ids], params_of(3))


def test_progress_bar(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["a", "b"], params_of(3), use_tqdm=True)
    assert "2/2" in capsys.readouterr().err
    llm.generate(["a", "b"], params_of(3), use_tqdm=False)
    assert capsys.readouterr().err == ""


def test_ctrl_c_leaves_it_usable(llm: LLM) -> None:
    # shells let background jobs ignore it
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["a", "b"], params_of(4000, ignore_eos=True), use_tqdm=False)
    finally:
        timer.join()
        signal.signal(signal.SIGINT, before)
    assert llm.generate("a", params_of(4), use_tqdm=False)[0].outputs[0].token_ids == oracle(
        "a", params_of(4)
    )


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


def test_stop_strings_end_requests_and_their_work(llm: LLM) -> None:
    whole = llm.generate("abc", params_of(200, allowed_token_ids=tuple(b"xyz")), use_tqdm=False)[
        0
    ].outputs[0]
    at = whole.text.index("xz", 5)
    fields: dict[str, Any] = {"allowed_token_ids": tuple(b"xyz"), "logprobs": 0, "min_tokens": 6}
    for include, end in ((False, at), (True, at + 2)):
        params = params_of(
            200, stop=("nothing", "xz"), include_stop_str_in_output=include, **fields
        )
        (output,) = llm.generate("abc", params, use_tqdm=False)
        (completion,) = output.outputs
        assert completion.text == whole.text[:end]
        assert (completion.finish_reason, completion.stop_reason) == ("stop", "xz")
        assert completion.token_ids == whole.token_ids[: at + 2], "up to the id that completed it"
        assert completion.logprobs is not None and len(completion.logprobs) == at + 2
        assert not llm.engine.has_work, "the engine has aborted it"


def test_stop_strings_behind_the_request_level_scheduler() -> None:
    with LLM(model=TOY, scheduler="request_level", max_num_seqs=2) as llm:
        params = params_of(50, allowed_token_ids=tuple(b"xyz"))
        whole = llm.generate("abc", params, use_tqdm=False)[0].outputs[0].text
        stop = whole[7:9]
        (output,) = llm.generate("abc", replace(params, stop=(stop,), logprobs=0), use_tqdm=False)
        (completion,) = output.outputs
        assert completion.text == whole[: whole.index(stop)]
        assert completion.logprobs is not None
        assert len(completion.token_ids) == len(completion.logprobs) == whole.index(stop) + 2
        assert not llm.engine.has_work


def test_stop_tokens_are_the_reason(llm: LLM) -> None:
    whole = oracle("stop", params_of(20))
    (output,) = llm.generate("stop", params_of(20, stop_token_ids=(whole[7],)), use_tqdm=False)
    assert output.outputs[0].stop_reason == whole[7]
    ended = llm.generate("a", params_of(9, logit_bias={256: 100.0}), use_tqdm=False)[0].outputs[0]
    assert (ended.token_ids, ended.text, ended.finish_reason, ended.stop_reason) == (
        (256,),
        "",
        "stop",
        None,
    )
    shown = params_of(
        9, logit_bias={256: 100.0}, include_stop_str_in_output=True, skip_special_tokens=False
    )
    assert llm.generate("a", shown, use_tqdm=False)[0].outputs[0].text == "<|end|>"


def test_log_probabilities(llm: LLM) -> None:
    params = SamplingParams(max_tokens=6, seed=3, logprobs=2, prompt_logprobs=1)
    (output, plain) = llm.generate(
        ["abcd", "abcd"], [params, replace(params, logprobs=None, prompt_logprobs=None)]
    )
    (completion,) = output.outputs
    whole = [*b"abcd", *completion.token_ids]
    scores = [
        by_id(token, one, llm.tokenizer)
        for token, one in zip(b"bcd", toy_score(list(b"abcd"), 1, vocab_size=257), strict=True)
    ]
    assert output.prompt_logprobs == (None, *scores)
    pairs = list(zip(completion.token_ids, toy_score(whole, 2, vocab_size=257)[3:], strict=True))
    assert completion.logprobs == tuple(by_id(token, one, llm.tokenizer) for token, one in pairs)
    first, (token_id, expected) = completion.logprobs[0], pairs[0]
    assert next(iter(first)) == token_id and first[token_id][:2] == (
        expected.logprob,
        expected.rank,
    )
    assert first[token_id].decoded_token == llm.get_tokenizer().decode([token_id])
    assert completion.cumulative_logprob == pytest.approx(sum(one.logprob for _, one in pairs))
    assert (
        plain.outputs[0].logprobs,
        plain.outputs[0].cumulative_logprob,
        plain.prompt_logprobs,
    ) == (None, None, None)
    assert plain.outputs[0].token_ids == completion.token_ids


def test_the_rest_of_the_context_and_no_text(llm: LLM) -> None:
    params = SamplingParams(max_tokens=None, ignore_eos=True, detokenize=False)  # type: ignore[arg-type]
    (output,) = llm.generate(list(b"abc"), params, use_tqdm=False)
    assert (
        len(output.outputs[0].token_ids) == llm.max_model_len - 3 and output.outputs[0].text == ""
    )
    assert output.num_cached_tokens >= 0
    with LLM(model=TOY, skip_tokenizer_init=True) as without:
        (output,) = without.generate([[97, 98]], params_of(4), use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 4 and output.outputs[0].text == ""
        with pytest.raises(RequestError, match="must be token ids"):
            without.generate("ab", params_of(4), use_tqdm=False)


def test_bad_words_never_come(llm: LLM) -> None:
    params = params_of(100, allowed_token_ids=tuple(b"xyz"))
    assert "xx" in llm.generate("abc", params, use_tqdm=False)[0].outputs[0].text
    text = (
        llm.generate("abc", replace(params, bad_words=("xx", " yz")), use_tqdm=False)[0]
        .outputs[0]
        .text
    )
    assert len(text) == 100 and "xx" not in text and "yz" not in text


@pytest.mark.parametrize(
    ("structured", "pattern"),
    [
        (StructuredOutput("regex", "[a-z]{3}-[0-9]+"), r"[a-z]{3}-[0-9]+"),
        (StructuredOutput("choice", '["yes", "no"]'), "yes|no"),
        (StructuredOutput("grammar", 'start: "<" /[ab]{2,5}/ ">"'), "<[ab]{2,5}>"),
        (StructuredOutput("json_object"), r"\{.*\}"),
        (
            StructuredOutput(
                "json_schema", '{"type": "array", "items": {"enum": [1, 2]}, "maxItems": 3}'
            ),
            r"\[[12,]*\]",
        ),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_structured_output(
    llm: LLM, structured: StructuredOutput, pattern: str, temperature: float
) -> None:
    params = SamplingParams(max_tokens=400, temperature=temperature, structured=structured, seed=5)
    bias = replace(params, logit_bias={ord(character): 30.0 for character in '"}]'} | {256: 60.0})
    outputs = llm.generate(["a", "hello", "b"], [bias, bias, params_of(9)], use_tqdm=False)
    for output in outputs[:2]:
        assert output.outputs[0].finish_reason == "stop"
        assert re.fullmatch(pattern, output.outputs[0].text)
    assert outputs[2].outputs[0].token_ids == oracle("b", params_of(9)), (
        "other requests are not affected"
    )


def test_a_structure_that_cannot_be_followed_is_an_error_of_its_request(
    llm: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    impossible = params_of(5, structured=StructuredOutput("regex", "a"), min_tokens=3)
    outputs = llm.generate(["x", "y"], [impossible, params_of(5)], use_tqdm=False)
    assert [output.outputs[0].finish_reason for output in outputs] == ["error", "length"]
    assert outputs[0].outputs[0].text == "a"
    assert "no token could follow" in caplog.text


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"structured": StructuredOutput("regex", "(")}, "regex cannot be used"),
        ({"bad_words": (" ",)}, "bad_words"),
        ({"allowed_token_ids": (257,)}, "allowed_token_ids: id 257"),
    ],
)
def test_bad_parameters_are_named_and_nothing_runs(llm: LLM, fields: Any, words: str) -> None:
    with pytest.raises(RequestError) as caught:
        llm.generate(["a", "b"], [params_of(2), params_of(2, **fields)], use_tqdm=False)
    assert words in caught.value.message and caught.value.param == "prompts[1]"
    assert llm.engine.stats.iterations == 0


def test_text_comes_in_pieces(llm: LLM) -> None:
    params = params_of(20)
    pieces = list(llm.stream_text("abc", params))
    assert len(pieces) > 10 and all(pieces)
    assert "".join(pieces) == llm.generate("abc", params, use_tqdm=False)[0].outputs[0].text


def test_pieces_that_others_have_made_come_too(llm: LLM) -> None:
    params = params_of(20)
    pieces = llm.stream_text("abc", params)
    first = next(pieces)
    (other,) = llm.generate("abc", params_of(40), use_tqdm=False)  # runs both to their ends
    assert other.outputs[0].text.startswith(first + "".join(pieces))


def test_text_after_the_iterator_is_dropped_is_not_generated(llm: LLM) -> None:
    llm.stream_text("abc", params_of(50))
    llm.generate([], use_tqdm=False)
    assert llm.engine.stats.iterations == 0 and not llm.engine.has_work
    with pytest.raises(RequestError, match=r"prompts\[0\]"):
        llm.stream_text(3, params_of(5))  # type: ignore[arg-type]


def test_texts_that_cannot_be_encoded(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A panic of the tokenizer, a text longer than any context, and a call of the tokenizer that hangs."""
    with LLM(model=TOY, tokenizer=write_hostile_tokenizer(tmp_path)) as hostile:
        with pytest.raises(RequestError, match=REASON) as caught:
            hostile.generate(["ab", PANICS], params_of(2), use_tqdm=False)
        assert caught.value.param == "prompts[1]"
        assert len(hostile.generate(["ab"], params_of(2), use_tqdm=False)) == 1
    with pytest.raises(RequestError, match="characters, and 4096 tokens of the context"):
        llm.generate("x" * (4096 * 7 + 1), use_tqdm=False)
    released = threading.Event()
    monkeypatch.setattr(ByteTokenizer, "encode", lambda *_, **__: released.wait())
    monkeypatch.setattr(llm, "_threads", WorkThreads(ENCODING._replace(seconds=0.01)))
    for params in (params_of(2), params_of(2, bad_words=("x",))):
        with pytest.raises(RequestError, match=r"longer than 0\.01 s"):
            llm.generate("hangs" if not params.bad_words else [1], params, use_tqdm=False)
    released.set()
    capfd.readouterr()  # the library writes its panics to standard error
