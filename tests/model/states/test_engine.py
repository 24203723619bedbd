"""Models with states in an engine: chunks, preemption, shared prefixes and iterations ahead change no token."""

from pathlib import Path
from random import Random

import pytest

from orca_jax.engine import Engine
from orca_jax.exec.executor import JaxExecutor
from orca_jax.sched import states
from orca_jax.sched.chunked import ChunkedScheduler
from orca_jax.sched.kv import KVManager
from orca_jax.sched.orderings.fcfs import FirstComeFirstServed
from orca_jax.sched.pool import RequestPool
from orca_jax.values.request import SamplingParams
from tests.exec.test_groups import PAGE_SIZE, ROWS, poisoned
from tests.model.states.hybrids import NEW, VOCAB
from tests.model.states.test_launches import LENGTH, NUM_STATES, executor_of, record

pytestmark = [
    pytest.mark.usefixtures("compiled_when_used", "few_programs", "quick_compiles"),
    pytest.mark.slow,
]
MOST_PAGES = 14  # of each group, for one and a half of the longest requests


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hybrids")


def engine_of(
    executor: JaxExecutor, num_stages: int, num_ahead: int, *, budget: int, reuses: bool
) -> Engine:
    groups = executor.config.cache.groups
    assert len(executor.config.cache.num_blocks) == 1
    num_states = (NUM_STATES if reuses else ROWS) if executor.config.cache.num_states else 0
    kv = KVManager(
        (MOST_PAGES * len(groups),),
        PAGE_SIZE,
        ROWS,
        groups=groups,
        longest=budget,
        num_states=num_states,
    )
    pool = RequestPool(kv, vocab_size=VOCAB, max_model_len=LENGTH, reuses_prefixes=reuses)
    scheduler = ChunkedScheduler(
        ROWS,
        budget,
        FirstComeFirstServed(),
        n_workers=num_stages + num_ahead,
        num_stages=num_stages,
    )
    return Engine(executor, scheduler, pool, check_in_interval=max(1, num_ahead))


def run(engine: Engine, tokens: dict[str, list[int]]) -> None:
    while engine.has_work:
        step(engine, tokens)


def step(engine: Engine, tokens: dict[str, list[int]]) -> None:
    for update in engine.step(None):
        assert update.finish_reason in (None, "length"), update
        tokens.setdefault(update.request_id, []).extend(update.new_ids)
    engine.pool.check_integrity()


def alone(executor: JaxExecutor, num_stages: int, prompt: list[int]) -> list[int]:
    """The answer to a prompt in one chunk, without other requests and without the prefix cache."""
    tokens: dict[str, list[int]] = {}
    engine = engine_of(executor, num_stages, 0, budget=LENGTH, reuses=False)
    engine.add_request("0", prompt, SamplingParams(max_tokens=NEW, temperature=0))
    run(engine, tokens)
    return tokens["0"]


@pytest.mark.parametrize(
    ("name", "form", "shards", "stages", "num_ahead"),
    [
        ("lfm3-1", "switched", 1, 1, 0),
        ("minimax-0", "scanned", 2, 1, 1),
        ("lfm2-1", "unrolled", 1, 2, 0),
        ("qwen3_next-0", "switched", 1, 1, 1),
        ("bamba-0", "switched", 1, 1, 3),
        ("falcon_h1-1", "switched", 2, 1, 1),
        ("mistral4-0", "switched", 2, 1, 1),
    ],
)
def test_the_schedule_changes_no_token(
    name: str,
    form: str,
    shards: int,
    stages: int,
    num_ahead: int,
    program_cache: str,
    base: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Requests share beginnings with recorded texts; they come, go on and are preempted in random order."""
    monkeypatch.setattr(states, "SNAPSHOT_TOKENS", 8)
    monkeypatch.setattr(states, "WORTH_A_SNAPSHOT", 4)
    executor = poisoned(executor_of(name, form, shards, stages, program_cache, base, copies=True))
    dice, texts = Random(name), [ids for ids, _ in record(name)]
    tokens: dict[str, list[int]] = {}
    prompts: dict[str, list[int]] = {}
    engine = engine_of(executor, stages, num_ahead, budget=10, reuses=True)
    for _ in range(110 * stages):
        action = dice.random()
        if action < 0.3 and len(engine.pool) < 5 and len(prompts) < 24:
            text = dice.choice((texts[0], texts[0], texts[1]))
            prompt = text[: dice.randint(min(9, len(text)), len(text))] + dice.choice(
                ([], [], [dice.randrange(VOCAB)])
            )
            prompts[str(len(prompts))] = prompt
            engine.add_request(
                str(len(prompts) - 1), prompt, SamplingParams(max_tokens=NEW, temperature=0)
            )
        elif action < 0.35 and engine.pool.running:
            victim = dice.choice(list(engine.pool.running.values()))
            if victim.finish_reason is None:
                engine.pool.preempt(victim)
        else:
            step(engine, tokens)
    run(engine, tokens)
    assert engine.pool.num_cache_hits > 60 and engine.pool.num_preemptions > 2, (
        "else it shows little"
    )
    for request_id, prompt in prompts.items():
        assert tokens[request_id] == alone(executor, stages, prompt), (request_id, prompt)
    for ids in texts:
        assert alone(executor, stages, ids[:-NEW]) == ids[-NEW:], "as transformers"
