"""Frames and messages of the link, the engine loop, and flags of the engine."""

import argparse
import dataclasses
import queue
import struct
import threading
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orca_jax.assembly.engine import build_engine
from orca_jax.engine import EngineStats
from orca_jax.flags import add_engine_args, engine_config_from_args, help_of, human_int
from orca_jax.link.loop import EngineLoop, EngineStatus, Inbox
from orca_jax.link.wire import (
    MAX_FRAME_BYTES,
    Abort,
    EngineAnswer,
    Failed,
    FrameReader,
    Heartbeat,
    Iterations,
    Message,
    Ready,
    Rejected,
    Start,
    Submit,
    Updates,
    Watch,
    decode_from_engine,
    decode_to_engine,
    encode,
)
from orca_jax.server_config import KvEvents
from orca_jax.values.config import EngineConfig
from orca_jax.values.errors import RequestError
from orca_jax.values.request import (
    Constraint,
    RequestMetrics,
    RequestUpdate,
    SamplingParams,
    StructuredOutput,
    TokenLogprobs,
    TokenSet,
    Urgency,
)
from orca_jax.values.startup import EngineSummary, StartReport
from orca_jax.values.step import ExecutorStats, SpannedPrompt, VectorSpan
from tests.sim.oracle import toy_generate

SPANNED = SpannedPrompt((1, 2, 3), (VectorSpan(0, 2, bytes(32), "image-1"),))
LOGPROBS = TokenLogprobs(-1.5, 2, (7, 1), (-0.25, -1.5))
TO_ENGINE = [
    Start(EngineConfig(model="preset:toy", max_model_len=77, dtype="bfloat16", compile_cache=None)),
    Start(
        EngineConfig(),
        12.5,
        KvEvents("tcp://127.0.0.1:5557", "kv@pod@model", "tcp://127.0.0.1:5558"),
    ),
    Submit(
        "r1",
        [1, 2, 3],
        SamplingParams(5, temperature=0.5, seed=-(2**63), stop_token_ids=(4,), ignore_eos=True),
    ),
    Submit(
        "r2",
        [5],
        SamplingParams(
            *(7, 0.5, 0.9, 3, 0.1, 9, (1, 2), True, 2, 0.5, -0.5, 1.5),
            logit_bias={3: -1.5, 4: 100},
            allowed_token_ids=(1, 2, 3),
            bad_token_ids=((1,), (2, 3)),
            logprobs=2,
            prompt_logprobs=0,
            structured=StructuredOutput("json_schema", "{}"),
        ),
        Urgency(-3, "a tenant", 1.5),
    ),
    Submit("r3", SPANNED, SamplingParams(5)),
    Abort("r1"),
    Watch(True),
]
FROM_ENGINE = [
    Ready("", "byte", 257, 64, 1000, 8),
    Ready("", "byte", 257, 64, 1000, 8, {"gpu": "wrong", "triton": "ok"}),
    Ready(
        "",
        "byte",
        257,
        64,
        1000,
        8,
        {},
        EngineSummary(64, 99, 1, 128, "orca", StartReport({"load": 0.5}, 2.5, 9, 8)),
    ),
    Rejected("r1", "no", "prompt"),
    Updates(
        [
            RequestUpdate("r1", (1,)),
            RequestUpdate("r2", (), "abort"),
            RequestUpdate("r3", (7, 8), "length", metrics=RequestMetrics(0.5, 1.0, 2.0, 3.0)),
            RequestUpdate("r4", (), "error", "not finite"),
            RequestUpdate(
                "r5", (1,), logprobs=(LOGPROBS,), prompt_logprobs=(LOGPROBS, TokenLogprobs(-0.5, 1))
            ),
        ],
        running=3,
        waiting=1,
    ),
    Iterations(b'{"end":{"n":1}}\n'),
    Heartbeat("compiling", 2.5),
    Heartbeat(
        "serving",
        0.0,
        EngineStats(1, 2, 3, 0.5, 0.25, 0.75, 4, 5, 1, 6, 9, 8, 100, 90, 1000),
        ExecutorStats(iterations=7),
    ),
    Failed("gone", "model", is_config=True),
]


@given(st.lists(st.sampled_from([*TO_ENGINE, *FROM_ENGINE]), max_size=8), st.integers(1, 50))
def test_frames_survive_any_cut(messages: list[Message], size: int) -> None:
    data = b"".join(encode(message) for message in messages)
    reader = FrameReader()
    payloads = [
        payload for at in range(0, len(data), size) for payload in reader.feed(data[at : at + size])
    ]
    known = [
        decode_to_engine if message in TO_ENGINE else decode_from_engine for message in messages
    ]
    assert [read(payload) for read, payload in zip(known, payloads, strict=True)] == messages


def test_ids_alone_are_an_array() -> None:
    """A prompt without vector spans costs no byte for them."""
    params = SamplingParams(5)
    fields = ["Submit", "r", [1, 2, 300], params, Urgency(), None, False, None]
    assert encode(Submit("r", [1, 2, 300], params))[4:] == msgspec.msgpack.encode(fields)


def test_halves_of_surrogate_pairs_are_sent_as_escapes() -> None:
    """Names in files of adapters and checkpoints may have them, and a refusal quotes the names."""

    def update(error: str) -> Updates:
        times = RequestMetrics(0.5, 1.0, 2.0, 3.0)
        return Updates(
            [RequestUpdate("é", (1, 2), "error", error, times, (LOGPROBS,), (), 3, b"\x00\xff")],
            1,
            2,
        )

    assert decode_from_engine(encode(update("a\udc00"))[4:]) == update(r"a\udc00")
    answer = EngineAnswer(3, "\ud800é", "lora_path")
    assert decode_from_engine(encode(answer)[4:]) == EngineAnswer(3, r"\ud800é", "lora_path")
    submit = Submit("r", [1], SamplingParams(1, logit_bias={3: 1.0}), adapter="\udcff")
    assert decode_to_engine(encode(submit)[4:]) == msgspec.structs.replace(
        submit, adapter=r"\udcff"
    )


def test_unreadable_frames_are_refused() -> None:
    with pytest.raises(ValueError, match="too long"):
        list(FrameReader().feed(struct.pack(">I", MAX_FRAME_BYTES + 1)))
    for payload in (
        b"\xc1",
        msgspec.msgpack.encode(["Ready", 1]),
        msgspec.msgpack.encode(["Nothing"]),
    ):
        with pytest.raises(msgspec.MsgspecError):
            decode_from_engine(payload)
    bad = SamplingParams(1)
    object.__setattr__(bad, "temperature", float("nan"))  # as a faulty front end might send it
    with pytest.raises(msgspec.ValidationError, match="temperature"):
        decode_to_engine(encode(Submit("r", [1], bad))[4:])
    never = Urgency()
    object.__setattr__(never, "deadline", float("inf"))
    with pytest.raises(msgspec.ValidationError, match="deadline"):
        decode_to_engine(encode(Submit("r", [1], SamplingParams(1), never))[4:])


class Anything:
    """A constraint that allows all tokens of the toy."""

    def allowed(self) -> TokenSet:
        return (1 << 257) - 1

    def accept(self, token_id: int) -> None:
        assert 0 <= token_id < 257


def constrained(value: str) -> SamplingParams:
    return SamplingParams(
        4, temperature=0, ignore_eos=True, structured=StructuredOutput("regex", value)
    )


def test_engine_loop() -> None:
    """The loop refuses impossible requests, aborts, ends with the front end, and leaves the engine unchanged."""
    engine = build_engine(EngineConfig(model="preset:toy", max_model_len=64, max_num_seqs=2)).engine
    inbox: Inbox = queue.SimpleQueue()
    sent: list[Message] = []
    ends: set[str] = set()
    status = EngineStatus()
    status.enter("serving")

    def send(message: Message) -> None:
        sent.append(message)
        if isinstance(message, Updates) and any(
            update.request_id == "long" for update in message.updates
        ):
            inbox.put(Abort("long"))
        ends.update(message.request_id for message in sent[-1:] if isinstance(message, Rejected))
        if isinstance(message, Updates):
            ends.update(update.request_id for update in message.updates if update.finish_reason)
        if len(ends) == 6:
            inbox.put(None)

    def compile_grammar(structured: StructuredOutput) -> Constraint:
        if structured.value == "crash":
            raise ZeroDivisionError
        if structured.value == "wrong":
            raise RequestError("no", "structured_outputs")
        if structured.value == "slow":
            assert released.wait(60)
        return Anything()

    released = threading.Event()
    for message in (
        Submit("bad", [300], SamplingParams(4)),
        Submit("long", [1], SamplingParams(60, ignore_eos=True)),
        Submit("short", [1], SamplingParams(4, temperature=0)),
        Abort("unknown"),
        *(
            Submit(f"grammar {value}", [1], constrained(value))
            for value in ("crash", "wrong", "fine", "slow")
        ),
        Abort("grammar slow"),
    ):
        inbox.put(message)
    EngineLoop(engine, inbox, send, status, compile_grammar).run_engine()
    released.set()
    rejected = {
        message.request_id: message.param for message in sent if isinstance(message, Rejected)
    }
    grammar = "structured_outputs"
    assert rejected == {"bad": "prompt", "grammar crash": grammar, "grammar wrong": grammar}
    updates = [
        update for message in sent if isinstance(message, Updates) for update in message.updates
    ]
    reasons = {
        update.request_id: update.finish_reason for update in updates if update.finish_reason
    }
    assert reasons == {"short": "length", "long": "abort", "grammar fine": "length"}
    last = sent[-1]
    assert isinstance(last, Updates) and (last.running, last.waiting) == (0, 0)
    engine.pool.check_integrity()
    beat = status.heartbeat()
    assert (beat.phase, beat.busy_seconds) == ("serving", 0) and beat.engine is not None
    assert beat.engine.free_pages == beat.engine.num_pages


def test_spans_are_refused_by_the_family() -> None:
    engine = build_engine(EngineConfig(model="preset:toy", max_model_len=64)).engine
    inbox: Inbox = queue.SimpleQueue()
    sent: list[Message] = []
    inbox.put(Submit("r", SPANNED, SamplingParams(4)))
    inbox.put(None)
    EngineLoop(engine, inbox, sent.append, EngineStatus(), lambda _: Anything()).run_engine()
    (refused,) = sent
    assert isinstance(refused, Rejected) and refused.param == "prompt"
    assert "vector spans, and models of the family toy read ids alone" in refused.message


def test_the_row_of_a_late_found_end_is_reported_free() -> None:
    engine = build_engine(
        EngineConfig(model="preset:toy", max_model_len=64, max_num_seqs=2, overlap=True)
    ).engine
    (stop, *_) = toy_generate([1], SamplingParams(1, temperature=0), vocab_size=257)
    inbox: Inbox = queue.SimpleQueue()
    sent: list[Updates] = []

    def send(message: Message) -> None:
        assert isinstance(message, Updates)
        sent.append(message)
        if message.running == 0:
            inbox.put(None)

    inbox.put(Submit("r", [1], SamplingParams(9, temperature=0, stop_token_ids=(stop,))))
    EngineLoop(engine, inbox, send, EngineStatus(), lambda _: Anything()).run_engine()
    assert [(len(message.updates), message.running) for message in sent] == [(1, 1), (0, 0)]


def parse(*flags: str, **defaults: Any) -> EngineConfig:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_engine_args(parser, **defaults)
    return engine_config_from_args(parser.parse_args(flags))


def test_every_field_has_a_flag_and_the_same_default() -> None:
    assert all(help_of(field.name) for field in dataclasses.fields(EngineConfig))
    assert parse() == EngineConfig()
    assert parse(max_num_seqs=7, model="preset:gpt2") == EngineConfig(
        model="preset:gpt2", max_num_seqs=7
    )


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--max-model-len", "4k"), {"max_model_len": 4000}),
        (("--max-model-len=4K",), {"max_model_len": 4096}),
        (("-tp", "2", "--block-size", "32"), {"tensor_parallel_size": 2, "page_size": 32}),
        (("--page-size", "8", "--dtype", "bfloat16"), {"page_size": 8, "dtype": "bfloat16"}),
        (("--kv-cache-dtype", "auto", "--load-format", "dummy"), {"load_format": "dummy"}),
        (("--gpu-memory-utilization", "0.5"), {"gpu_memory_utilization": 0.5}),
        (
            ("--compile-cache", "none", "--strict-compile"),
            {"compile_cache": None, "strict_compile": True},
        ),
        (
            ("--no-progress", "--scheduler", "request_level"),
            {"progress": False, "scheduler": "request_level"},
        ),
    ],
)
def test_flags(flags: tuple[str, ...], expected: dict[str, Any]) -> None:
    assert parse(*flags) == EngineConfig(**expected)


def test_human_numbers() -> None:
    values = {"7": 7, "-1": -1, "1.5k": 1500, "1.001k": 1001, "2m": 2 * 10**6, "1G": 2**30}
    assert {text: human_int(text) for text in values} == values
    for wrong in ("", "k", "1.0001k", "9" * 400 + ".5", "4 k k", "1e3", "nan", "0x10"):
        with pytest.raises(argparse.ArgumentTypeError):
            human_int(wrong)
