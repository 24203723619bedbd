"""`LLM`: the engine in this process, for scripts and notebooks, with the interface of vLLM."""

import itertools
import weakref
from collections.abc import Generator, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Self, cast

from orca_jax.assembly.built import Built
from orca_jax.assembly.engine import build_engine
from orca_jax.engine import Engine
from orca_jax.helpers import console
from orca_jax.llm.arguments import (
    Loras,
    PlainPrompt,
    PromptInput,
    as_list,
    check_pooling,
    encode_prompt,
    engine_settings,
    ids_only,
    naming,
    one_for_each,
    plain_prompt,
    urgencies,
)
from orca_jax.llm.chat import ChatTokenizer, Conversation, Conversations, as_conversations
from orca_jax.llm.decide import DecisionTexts, scores_of
from orca_jax.llm.driver import DrivenLLM
from orca_jax.llm.embed import EmbeddingRequestOutput, embedded
from orca_jax.llm.loras import LoadedAdapters
from orca_jax.llm.open_requests import OfflineCall, OpenPrompt, text_pieces
from orca_jax.llm.outputs import RequestOutput
from orca_jax.llm.turns import Turns
from orca_jax.text.decisions.questions import Question
from orca_jax.text.decisions.reads import FitsByKind, OptionOrder, TypedAnswer, own_salt
from orca_jax.text.grammar import GrammarFactory
from orca_jax.text.tokenizer import BYTE_TOKENIZER, Tokenizer
from orca_jax.text.work_threads import ENCODING, WorkThreads
from orca_jax.values.errors import RequestError
from orca_jax.values.request import Constraint, Pooling, SamplingParams, Urgency, of_candidate


class _CheckedPrompt(NamedTuple):
    """A checked prompt, with its ids and parameters for the engine."""

    prompt: PlainPrompt
    params: SamplingParams  # of the user
    ids: list[int]
    in_ids: SamplingParams  # of the engine
    constraints: Sequence[Constraint | None]  # of each candidate


class LLM(DrivenLLM):
    """An engine in this process that generates text. Dropping it frees the memory of the device, as `close` does.

    Any thread may call any method. Threads take turns at the engine, one iteration each, and an iteration serves the
    requests of all of them. An iterator belongs to one thread at a time.

    Example:
        llm = LLM(model="demo", max_num_seqs=32)
        for output in llm.generate(["One", "Two"], SamplingParams(max_tokens=32)):
            print(output.outputs[0].text)

    Args:
        model: "demo", a directory, a name of the Hugging Face Hub (ORG/NAME), or "preset:<name>".
        skip_tokenizer_init: read no tokenizer; prompts are ids, and outputs have no text.
        settings: any field of `EngineConfig`. `decoder` may be the class itself. Those of vLLM's that have no effect
            here are named in the log, and the others refused (docs/vllm.md).

    Raises:
        ConfigError: a setting is unknown or wrong; `param` names it.
    """

    def __init__(
        self, model: str = "demo", *, skip_tokenizer_init: bool = False, **settings: Any
    ) -> None:
        if skip_tokenizer_init:
            # for the parts that need one; no text reaches it
            settings["tokenizer"] = BYTE_TOKENIZER
        config = engine_settings("LLM", model, settings)
        self._built = built = build_engine(config)
        self._has_priorities = "priority" in built.reads
        self.engine: Engine = built.engine
        self.tokenizer: Tokenizer = built.tokenizer
        self.max_model_len: int = built.max_model_len
        # of the chat template and the sampling defaults; empty for a preset
        self.directory: str = built.directory
        self.timeline_header = built.timeline_header  # for `orca_jax.timeline.record`
        self._grammars: GrammarFactory = built.grammars
        self._threads = WorkThreads(ENCODING)
        self._turns = Turns(built.engine)
        self._loras = LoadedAdapters(built, self._turns)
        self._conversations = Conversations(built.directory)
        self._decision_texts = DecisionTexts(
            self.tokenizer, self._conversations, built.max_model_len
        )
        self._ids_only = skip_tokenizer_init
        self._numbers = itertools.count()
        self._free = weakref.finalize(self, _free, built, self._conversations)
        self._free.atexit = False  # the system frees the memory, and JAX may have ended before

    def generate(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
        *,
        lora_request: Loras = None,
    ) -> list[RequestOutput]:
        """Run all prompts, and return their outputs in the order of the prompts.

        Args:
            prompts: strings, lists of token ids, or dicts as in vLLM, also mixed; one alone counts as a list of one.
            sampling_params: one for all prompts, one for each prompt, or None for the defaults.
            use_tqdm: show a progress bar on standard error.
            priority: one number for each prompt; a lower one runs sooner. It needs `scheduling_policy="priority"`.
                None: all prompts have the same priority.
            lora_request: an adapter for all prompts, or one or None for each, with `enable_lora=True`. The first use of
                a name loads it, until `unload_lora`.

        Raises:
            RequestError: a prompt or its parameters are wrong; `param` names it. No prompt was run.
        """
        return self._run(as_list(prompts), sampling_params, use_tqdm, priority, lora_request)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        *,
        lora_request: Loras = None,
    ) -> list[RequestOutput]:
        """Answer conversations, and return the outputs in their order.

        Args:
            messages: one conversation in OpenAI's format, or a list of them.
            sampling_params: the parameters of `generate`.
            use_tqdm: show a progress bar on standard error.
            chat_template: a file with another chat template; None for that of the model.
            add_generation_prompt: end the prompt with the beginning of an answer.
            continue_final_message: end the prompt within the last message, so that the model continues it.
            tools: tools in OpenAI's format for the chat template. Calls in an answer are left as text.
            chat_template_kwargs: further variables of the template.
            lora_request: the adapter, as in `generate`.

        Raises:
            ConfigError: the chat template is wrong.
            RequestError: a message or a parameter is wrong; `param` names it. No conversation was answered.
        """
        self._turns.check_usable()
        texts = [
            self._conversations.render(
                conversation,
                template_file=chat_template,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                kwargs=chat_template_kwargs,
            )
            for conversation in as_conversations(messages)
        ]
        return self._run(
            texts, sampling_params, use_tqdm, None, lora_request, has_special_tokens=True
        )

    def get_tokenizer(self) -> ChatTokenizer:
        """Return the tokenizer of the model, with its chat template."""
        return ChatTokenizer(self.tokenizer, self._conversations)

    def unload_lora(self, lora_name: str) -> None:
        """Forget an adapter. Its name may then stand for another one. Raises RequestError."""
        self._loras.unload(lora_name)

    def embed(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        pooling: Pooling = "last",
        normalize: bool = True,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Return the embeddings of all prompts in their order, from the hidden vectors after the last norm.

        `pooling` is "last" for the vector of the last token, or "mean" for the mean over all tokens; `normalize` scales
        it to a length of one. The other arguments and errors are as in `generate`. Raises EngineError for NaN.
        """
        call, added = self._add(
            as_list(prompts), SamplingParams(max_tokens=1, pooling=pooling), priority, pools=True
        )
        with console.bar(
            total=len(added), desc="Embedding", unit="req", disable=not use_tqdm
        ) as bar:
            for _ in self._drain(call):
                bar.update()
        return [embedded(prompt.candidates[0], normalize) for prompt in added]

    def decide(
        self,
        state: Any,
        questions: Sequence[Question],
        *,
        order: OptionOrder = "given",
        temperature: float = 1.0,
        calibration: FitsByKind | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        cache_salt: str = "",
        priority: int = 0,
        lora_request: Loras = None,
    ) -> list[TypedAnswer]:
        """Answer typed questions about a state by the probabilities of their labels, one token for each.

        The state is computed once, and all questions run together. A decision is the same, to the bit on a CPU, beside
        any other requests, in any order, and from the cache.

        Args:
            state: a text, a value of JSON, or a conversation in OpenAI's format that ends with the user.
            questions: see `orca_jax.Question`.
            order: "given", or "averaged" over several rotations of lettered options.
            temperature: divides the log probabilities of the labels, after the calibration.
            calibration: the fits of `load_calibration`, of `orca_jax.text.decisions.calibration`; None: none.
            chat_template: a file with another chat template; None for that of the model.
            chat_template_kwargs: further variables of the template.
            cache_salt: only calls with the same salt share cached states.
            priority: as in `generate`, for all questions.
            lora_request: the adapter, as in `generate`.

        Raises:
            ConfigError: the chat template is wrong.
            EngineError: the logits are not finite.
            RequestError: an argument is wrong; `param` names it.
        """
        self._turns.check_usable()
        texts = self._decision_texts
        arguments = (order, temperature, chat_template, chat_template_kwargs)
        reading = self._threads.run_call(partial(texts.reading, state, questions, *arguments))
        salt = own_salt(cache_salt, reuses_prefixes=self._built.summary.reuses_prefixes)
        call, added = self._add(
            [read.prompt_ids for read in reading.reads],
            [read.params(reading.shared, salt) for read in reading.reads],
            [priority] * len(reading.reads),
            lora_request=lora_request,
        )
        for _ in self._drain(call):
            pass
        return reading.decisions(scores_of(added), temperature, calibration)

    def _run(
        self,
        prompts: Sequence[PromptInput],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        priority: Sequence[int] | None,
        lora_request: Loras,
        *,
        has_special_tokens: bool = False,
    ) -> list[RequestOutput]:
        """Run all prompts with a progress bar. The arguments are those of `generate` and `_add`."""
        call, added = self._add(
            prompts, sampling_params, priority, has_special_tokens, lora_request
        )
        outputs = dict[str, RequestOutput]()
        num_tokens = 0
        options = {
            "desc": "Generating",
            "unit": "req",
            "disable": not use_tqdm,
            "dynamic_ncols": True,
        }
        with console.bar(total=len(added), **options) as bar:
            for output in self._drain(call):
                outputs[output.request_id] = output
                num_tokens += sum(len(completion.token_ids) for completion in output.outputs)
                bar.set_postfix_str(f"{num_tokens} tokens", refresh=False)
                bar.update()
        return [outputs[prompt.request_id] for prompt in added]

    def stream(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        priority: Sequence[int] | None = None,
        *,
        lora_request: Loras = None,
    ) -> Iterator[RequestOutput]:
        """Yield each output as soon as its request ends.

        The engine runs only during calls of `next`, and of other methods. Closing or dropping the iterator aborts the
        remaining requests, at the next turn of the engine. Arguments and errors are as in `generate`.
        """
        return self._drain(
            self._add(as_list(prompts), sampling_params, priority, lora_request=lora_request)[0]
        )

    def stream_text(
        self, prompt: PromptInput, sampling_params: SamplingParams | None = None
    ) -> Iterator[str]:
        """Yield the generated text of one prompt in pieces. Closing or dropping the iterator aborts the request.

        Raises:
            RequestError: the prompt or its parameters are wrong; `param` names it.
        """
        return self._pieces(prompt, sampling_params)

    def stream_chat(
        self,
        messages: Conversation,
        sampling_params: SamplingParams | None = None,
        chat_template: str | None = None,
    ) -> Iterator[str]:
        """Yield the answer to one conversation in pieces, as `stream_text` does. Arguments and errors as in `chat`."""
        (conversation,) = as_conversations(messages)
        text = self._conversations.render(conversation, template_file=chat_template)
        return self._pieces(text, sampling_params, has_special_tokens=True)

    def _pieces(
        self,
        prompt: PromptInput,
        params: SamplingParams | None,
        *,
        has_special_tokens: bool = False,
    ) -> Iterator[str]:
        if params is not None and params.n > 1:
            raise RequestError(
                f"n must be 1 for a stream of text, got {params.n}; use generate", param="n"
            )
        call, (added,) = self._add([prompt], params, None, has_special_tokens)
        turns = self._turns
        ids = tuple(call.candidates)
        return text_pieces(call, added.candidates[0], turns.step, lambda: turns.drop(ids))

    def close(self) -> None:
        """Free the memory of the device. The LLM cannot be used afterwards."""
        self._turns.close(self._free)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _add(
        self,
        prompts: Sequence[PromptInput],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: Sequence[int] | None,
        has_special_tokens: bool = False,
        lora_request: Loras = None,
        *,
        pools: bool = False,
    ) -> tuple[OfflineCall, list[OpenPrompt]]:
        """Add all prompts to the engine in one turn, or none of them.

        `has_special_tokens` is True for texts of a chat template, which has them. `pools` is True for embeddings.
        """
        self._turns.check_usable()
        params = one_for_each(sampling_params, len(prompts))
        if self._ids_only:
            params = [ids_only(one) for one in params]
        check_pooling(params, pools=pools)
        urgency = urgencies(priority, len(prompts), has_priorities=self._has_priorities)
        adapters = self._loras.names(lora_request, len(prompts))
        prepared: list[_CheckedPrompt] = []
        for index, prompt_input in enumerate(prompts):
            with naming(index):
                prepared.append(self._prepare(prompt_input, params[index], has_special_tokens))
        call = OfflineCall()
        added = list[OpenPrompt]()
        try:
            with self._turns.entry():
                call.weight_version = self.engine.weight_version
                for index, one in enumerate(prepared):
                    added.append(self._add_one(call, index, one, urgency[index], adapters[index]))
        except BaseException:  # also Ctrl-C, at the end of the turn
            self._turns.drop(call.candidates)
            raise
        return call, added

    def _prepare(
        self, prompt_input: PromptInput, params: SamplingParams, has_special_tokens: bool
    ) -> _CheckedPrompt:
        """Check and encode a prompt, and compile its grammar, beside the turns of other threads."""
        prompt = plain_prompt(prompt_input)
        if self._ids_only and isinstance(prompt, str):
            raise RequestError(
                "it must be token ids, since this LLM has skip_tokenizer_init=True", param="prompt"
            )
        sizes = self.tokenizer, self.max_model_len
        ids, in_ids = encode_prompt(prompt, params, *sizes, self._threads, has_special_tokens)
        constraints: list[Constraint | None] = [None] * params.n
        if params.structured is not None:
            constraints = [self._grammars.compile(params.structured) for _ in range(params.n)]
        return _CheckedPrompt(prompt, params, ids, in_ids, constraints)

    def _add_one(
        self,
        call: OfflineCall,
        place: int,
        one: _CheckedPrompt,
        urgency: Urgency,
        adapter: str | None,
    ) -> OpenPrompt:
        """Add the candidates of one prompt, in a turn. Errors name its place in the call."""
        prompt, params, ids, in_ids, constraints = one
        request_id = str(next(self._numbers))
        text = prompt if isinstance(prompt, str) else None
        of = OpenPrompt(request_id, call, text, tuple(ids))
        for index, constraint in enumerate(constraints):
            candidate_id = f"{request_id}.{index}" if index else request_id
            own = of_candidate(in_ids, index)
            with naming(place):
                self.engine.add_request(candidate_id, ids, own, constraint, urgency, adapter)
            self._turns.open[candidate_id] = of.add_candidate(self.tokenizer, params)
            call.candidates.append(candidate_id)
        call.num_open += 1
        return of

    def _drain(self, call: OfflineCall) -> Iterator[RequestOutput]:
        """Yield the outputs of a call. The generator is started at once: dropping it unused aborts the requests too."""

        def outputs() -> Generator[RequestOutput | None]:
            try:
                yield None
                # in this order: another thread's turn may end the call meanwhile
                while call.num_open or call.done:
                    if not call.done:
                        self._turns.step(call.has_news)
                        continue
                    yield call.done.popleft()
            finally:
                if call.num_open:
                    self._turns.drop(call.candidates)

        generator = outputs()
        next(generator)
        return cast(Iterator[RequestOutput], generator)  # only the first value is None


def _free(built: Built, conversations: Conversations) -> None:
    """Free what an `LLM` holds. It must not refer to the `LLM`."""
    conversations.close()
    built.close()
