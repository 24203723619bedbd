"""`LLM.chat` and several candidates for each prompt, on the toy model."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orca_jax import LLM, SamplingParams
from orca_jax.values.errors import ConfigError, RequestError
from orca_jax.values.request import StructuredOutput, candidate_seed
from tests.sim.oracle import toy_generate

HELLO = [{"role": "user", "content": "Hello"}]
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}{{ tone }}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def llm() -> Iterator[LLM]:
    with LLM(model="preset:toy", max_num_seqs=4, max_model_len=4096, page_size=16) as made:
        yield made
        made.engine.pool.check_integrity()
        assert not made.engine.has_work


@pytest.fixture
def template(tmp_path: Path) -> str:
    path = tmp_path / "own.jinja"
    path.write_text(TEMPLATE)
    return str(path)


def oracle(prompt: str | list[int], params: SamplingParams) -> tuple[int, ...]:
    ids = list(prompt.encode()) if isinstance(prompt, str) else prompt
    return tuple(toy_generate(ids, params, vocab_size=257, eos_token_ids=(256,)))


def test_a_conversation_is_answered_as_its_rendered_text(llm: LLM, template: str) -> None:
    params = SamplingParams(max_tokens=5, temperature=0)
    more = [
        *HELLO,
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": [{"type": "text", "text": "A"}]},
    ]
    outputs = llm.chat([HELLO, more], params, use_tqdm=False, chat_template=template)
    texts = ["<user>Hello<assistant>", "<user>Hello<assistant>Hi.<user>A<assistant>"]
    assert [output.prompt for output in outputs] == texts
    assert [output.outputs[0].token_ids for output in outputs] == [
        oracle(text, params) for text in texts
    ]


def test_options_of_the_template(llm: LLM, template: str) -> None:
    params = SamplingParams(max_tokens=1)
    options: dict[str, Any] = {"use_tqdm": False, "chat_template": template}
    (plain,) = llm.chat(
        HELLO, params, add_generation_prompt=False, chat_template_kwargs={"tone": "!"}, **options
    )
    assert plain.prompt == "<user>Hello!"
    begun = [*HELLO, {"role": "assistant", "content": "He said"}]
    (output,) = llm.chat(
        begun, params, add_generation_prompt=False, continue_final_message=True, **options
    )
    assert output.prompt == "<user>Hello<assistant>He said"


def test_the_tokenizer_renders_conversations(llm: LLM) -> None:
    """As `LLM.chat` does, by the template of the model."""
    tokenizer, options = llm.get_tokenizer(), {"add_generation_prompt": True}
    text = tokenizer.apply_chat_template(HELLO, tokenize=False, **options)
    ids = tokenizer.apply_chat_template(HELLO, **options)
    (answer,) = llm.chat(HELLO, SamplingParams(max_tokens=3, temperature=0), use_tqdm=False)
    assert (text, ids) == (answer.prompt, list(answer.prompt_token_ids))
    (same,) = llm.generate(
        {"prompt_token_ids": ids}, SamplingParams(max_tokens=3, temperature=0), use_tqdm=False
    )
    assert same.outputs[0].token_ids == answer.outputs[0].token_ids
    begun = tokenizer.apply_chat_template(HELLO, tokenize=False)
    assert isinstance(begun, str) and str(text).startswith(begun) and begun != text


def test_a_chat_is_streamed(llm: LLM, template: str) -> None:
    params = SamplingParams(max_tokens=20, temperature=0)
    pieces = list(llm.stream_chat(HELLO, params, template))
    assert "".join(pieces) == llm.chat(HELLO, params, False, template)[0].outputs[0].text
    assert len(pieces) > 1


@pytest.mark.parametrize(
    ("messages", "match"),
    [
        ("Hello", "messages must be a list"),
        ([], "messages must be a list"),
        ([[]], "with a role"),
        ([{"content": "a"}], "with a role"),
        ([{"role": "user", "content": 3}], "must be text, got int"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], "type text"),
    ],
)
def test_wrong_conversations_are_refused(llm: LLM, messages: Any, match: str) -> None:
    with pytest.raises(RequestError, match=match) as caught:
        llm.chat(messages, use_tqdm=False)
    assert caught.value.param == "messages"


def test_a_wrong_template_is_refused(llm: LLM, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        llm.chat(HELLO, chat_template=str(tmp_path / "missing.jinja"), use_tqdm=False)
    assert caught.value.param == "chat_template"
    assert len(llm.chat(HELLO, SamplingParams(max_tokens=1), use_tqdm=False)) == 1, (
        "the plain template of a preset"
    )


def test_candidates_have_seeds_of_their_own(llm: LLM) -> None:
    params = SamplingParams(max_tokens=12, n=3, seed=7, logprobs=1, prompt_logprobs=0)
    outputs = llm.generate(["abc", "de"], params, use_tqdm=False)
    for output, prompt in zip(outputs, ("abc", "de"), strict=True):
        assert [completion.index for completion in output.outputs] == [0, 1, 2]
        for index, completion in enumerate(output.outputs):
            alone = replace(params, n=1, seed=candidate_seed(7, index))
            assert completion.token_ids == oracle(prompt, alone)
            assert completion.text == llm.tokenizer.decode(completion.token_ids)
            assert completion.logprobs is not None and len(completion.logprobs) == len(
                completion.token_ids
            )
        assert len({completion.token_ids for completion in output.outputs}) > 1
        assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == len(prompt)
        assert output.metrics is not None and output.metrics.arrival <= output.metrics.finished


def test_candidates_end_by_their_own_stop_strings(llm: LLM) -> None:
    params = SamplingParams(max_tokens=60, n=4, seed=1, temperature=2, ignore_eos=True)
    texts = [one.text for one in llm.generate("abc", params, use_tqdm=False)[0].outputs]
    stop = max("".join(texts), key=lambda char: len({text.find(char) for text in texts}))
    ends = [text.find(stop) for text in texts]
    assert len(set(ends)) > 1, "they end at different times"
    (output,) = llm.generate("abc", replace(params, stop=(stop,)), use_tqdm=False)
    for one, text, end in zip(output.outputs, texts, ends, strict=True):
        assert (one.text, one.finish_reason) == (
            (text, "length") if end < 0 else (text[:end], "stop")
        )


def test_candidates_share_a_grammar(llm: LLM) -> None:
    params = SamplingParams(max_tokens=10, n=3, structured=StructuredOutput("regex", "[ab]{4}"))
    (output,) = llm.generate("abc", params, use_tqdm=False)
    assert all(len(one.text) == 4 and set(one.text) <= set("ab") for one in output.outputs)


def test_the_number_of_candidates_is_checked(llm: LLM) -> None:
    with pytest.raises(RequestError, match="n must be an integer from 1 to 128, got 0"):
        SamplingParams(n=0)
    with pytest.raises(RequestError, match="n must be 1 for a stream of text, got 2"):
        llm.stream_text("a", SamplingParams(n=2))
    with pytest.raises(RequestError, match="n must be 1 for the engine, got 2"):
        llm.engine.add_request("x", [1], SamplingParams(n=2))


def test_dropping_a_stream_aborts_all_candidates(llm: LLM) -> None:
    outputs = llm.stream(["a", "b"], SamplingParams(max_tokens=1000, n=2, ignore_eos=True))
    assert llm.engine.has_work
    del outputs
    llm.generate([], use_tqdm=False)  # the next turn
    assert not llm.engine.has_work
