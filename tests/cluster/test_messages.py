"""Calls arrive as they were sent, and a difference of any of them or of a result shows in the digest."""

import random
import re

import pytest

from orca_jax.cluster.digest import Digester
from orca_jax.cluster.messages import (
    PROTOCOL,
    Allowed,
    Hello,
    InvalidMessageError,
    Iteration,
    Refused,
    Rest,
    Stop,
    Welcome,
    WorkerBeat,
    WorkerFailed,
    decode_call,
    decode_to_leader,
    decode_to_worker,
    encode,
    pack_sets,
    read_sets,
)
from orca_jax.cluster.roll import Roll
from orca_jax.cluster.version import own_code, own_version
from orca_jax.values.request import SamplingParams
from orca_jax.values.step import (
    Member,
    MemberResult,
    RowSampling,
    SpannedPrompt,
    StateMove,
    StepPlan,
    StepResult,
    VectorSpan,
)

SPANNED = SpannedPrompt((5, 6), (VectorSpan(-3, 4, bytes(32), "image-1"),))
SAMPLING = RowSampling(SamplingParams(temperature=0.5), 2**63 - 1, 2)
PLANS = [
    StepPlan(0, (Member("a", 3, 0, [5, 6], True, sampling=SAMPLING),)),
    StepPlan(
        7,
        (
            Member("a", 3, 2, [], True, last_on_device=True),
            Member("b", 0, 4, [8], False, new_blocks=([1, 2],)),
        ),
    ),
    StepPlan(
        3, (Member("a", 3, 0, [5], False, state=StateMove(-1, 4)), Member("b", 0, 4, [8], True))
    ),
    StepPlan(4, (Member("a", 3, 5, SPANNED, False),)),
]


@pytest.mark.parametrize("plan", PLANS, ids=["new", "mixed", "states", "spans"])
def test_a_plan_arrives_unchanged(plan: StepPlan) -> None:
    payload = encode(Iteration(plan, 5))
    call = decode_call(payload)
    assert isinstance(call, Iteration)
    assert encode(call) == payload
    assert call.num_collected == 5
    assert isinstance(call.plan.members[0], Member)
    assert call.plan.members[0].state == plan.members[0].state
    assert call.plan.members[0].ids == plan.members[0].ids


def test_sets_of_any_vocabulary_arrive_unchanged() -> None:
    sets = [1, 1 << 151_935, (1 << 257) - 1, 0b1010]
    call = decode_call(encode(pack_sets(sets)))
    assert isinstance(call, Allowed)
    assert read_sets(call) == sets


def test_halves_of_surrogate_pairs_are_sent_as_escapes() -> None:
    """The reason of a worker's failure quotes names in files."""
    found = decode_to_leader(encode(WorkerFailed("é: a\udc00", "model", is_config=True)))
    assert found == WorkerFailed(r"é: a\udc00", "model", is_config=True)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        encode(Rest())[:-1],
        b"\x80",
        b"\x04not a message",
        b"\x92\xa5Hello\xa2\xff\xf1",
    ],
)
def test_other_bytes_are_refused(payload: bytes) -> None:
    for decode in (decode_call, decode_to_leader, decode_to_worker):
        with pytest.raises(InvalidMessageError):
            decode(payload)


def test_changed_messages_are_refused_or_read() -> None:
    """Of 2,000 messages with other bytes, none raises another error. Texts that are not UTF-8 once did."""
    draw = random.Random(0)
    sent = [
        hello(),
        WorkerFailed("reason", "model"),
        *(Iteration(plan, 5) for plan in PLANS),
        pack_sets([1 << 70]),
    ]
    sent += [
        Welcome(b"plans", None),
        Refused("other version"),
        Stop(3, "end"),
        WorkerBeat(1, 1, 0.5, 9.0, "place"),
    ]
    payloads = [encode(message) for message in sent]
    reasons = set()
    for _ in range(2000):
        payload = bytearray(draw.choice(payloads))
        for _ in range(draw.choice((1, 1, 2, 5))):
            payload[draw.randrange(len(payload))] = draw.choice(
                (0xFF, 0xC1, 0x80, draw.randrange(256))
            )
        for decode in (decode_call, decode_to_leader, decode_to_worker):
            try:
                decode(bytes(payload))
            except InvalidMessageError as error:
                reasons.add(str(error).partition(":")[0])
    assert {"ValidationError", "DecodeError", "UnicodeDecodeError"} <= reasons


def result(*runs: tuple[int, ...] | None, is_finite: bool = True) -> StepResult:
    return StepResult(0, [MemberResult(run, is_finite) for run in runs])


def test_a_digest_depends_on_all_before_it() -> None:
    same = [Digester(), Digester()]
    assert same[0].add_iteration([b"plan"], result((1,), (2,))) == same[1].add_iteration(
        [b"plan"], result((1,), (2,))
    )
    digests = {
        Digester().add_iteration(payloads, each)
        for payloads in ([b"plan"], [b"plan", b"sets"])
        for each in (result((1,), (2,)), result((2,), (1,)), result((1, 2), ()), result((), (1, 2)))
    }
    assert len(digests) == 8
    assert same[0].add_iteration([b"next"], result((5,))) != Digester().add_iteration(
        [b"next"], result((5,))
    )


def test_an_id_without_a_meaning_is_left_out() -> None:
    one, other = (
        Digester().add_iteration([b"plan"], result((token,), is_finite=False)) for token in (1, 2)
    )
    assert one == other


def hello(**fields: object) -> Hello:
    values = {
        "protocol": PROTOCOL, "version": own_version(), "code": own_code(), "rank": 1, "nnodes": 3, "host": "h",
        "machine": "m", "pid": 7, "cores": 2, "has_devices": True,
    }  # fmt: skip
    return Hello(**{**values, **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("other", "hint", "param"),
    [
        (
            hello(protocol=99),
            rf"version .* \(protocol 99\), and the leader .* \(protocol {PROTOCOL}\)",
            None,
        ),
        (hello(version="0.0.1"), "version 0.0.1", None),
        (hello(code="x"), "the code of worker 1 differs", None),
        (hello(nnodes=2), "worker 1 has 2 nodes, and the leader 3", "nnodes"),
        (hello(rank=0), "rank 0 is not in 1..2", "node_rank"),
        (hello(rank=3), "rank 3 is not in 1..2", "node_rank"),
        (hello(has_devices=False), "different models", "model"),
    ],
)
def test_a_process_that_does_not_fit_is_refused_by_name(
    other: Hello, hint: str, param: str | None
) -> None:
    refusal = Roll(3, has_devices=True).join(b"x", 5, other)
    assert refusal is not None
    assert re.search(hint, refusal.reason)
    assert refusal.param == param


def test_a_rank_may_come_again_until_all_are_there() -> None:
    roll = Roll(3, has_devices=True)
    assert roll.join(b"x", 5, hello()) is None
    assert roll.join(b"y", 6, hello()) is not None, "the rank is taken"
    assert roll.leave(5) is None, "it is no loss yet"
    assert roll.join(b"y", 6, hello()) is None
    assert roll.close() is None
    assert roll.join(b"z", 7, hello(rank=2)) is None
    hellos = roll.close()
    assert hellos is not None and [each.rank for each in hellos] == [1, 2]
    assert roll.leave(6) == 1 and roll.rank_of(b"y") == 1, (
        "the loss of a worker leaves its place taken"
    )
