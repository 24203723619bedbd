"""The walks of a scheduler, an order and a family of models."""

from tests.project.rows.walk import Edit, Walk, after

DOORS = "tests/doors/lines.toml"
TOY_LINE = '"generate hi --model $toy $few --scheduling-policy priority --speculative-config $ngrams" = "."'

SCHEDULER = Walk(
    "a scheduler",
    (
        Edit(
            "orca_jax/sched/alone.py",
            '''"""One request at a time, in order of arrival."""

from typing import ClassVar, Self

from orca_jax.sched.kv import KVManager
from orca_jax.sched.pool import RequestPool
from orca_jax.sched.request import Request, State
from orca_jax.sched.scheduler import Choice, SchedulerSettings, Selection
from orca_jax.values.config import SCHEDULERS, Traits


class AloneScheduler:
    """The earliest request runs alone until it ends."""

    traits: ClassVar[Traits] = SCHEDULERS["alone"].traits
    n_workers = 1

    @classmethod
    def from_settings(cls, settings: SchedulerSettings) -> Self:
        return cls()

    def select(self, pool: RequestPool, kv: KVManager) -> Selection:
        """The earliest request, unless an iteration of it is in flight."""
        first = next(iter(pool))
        if first.state is State.RUNNING:
            return Selection(())
        return Selection((Choice(first, first.num_left),))

    def may_return(self, request: Request) -> bool:
        """Always true."""
        return True
''',
        ),
        after(
            "orca_jax/values/config.py",
            "SCHEDULERS: Mapping[str, NamedScheduler] = {",
            """    "alone": NamedScheduler(
        "orca_jax.sched.alone:AloneScheduler", "alone: one request", Traits(has_reservations=True)
    ),
""",
        ),
        Edit(
            "tests/sched/test_alone.py",
            '''"""One request at a time."""

from tests.sched.lab import run_lab


def test_the_second_request_waits_for_the_first() -> None:
    lab = run_lab([("A", 2, 2), ("B", 3, 1)], name="alone")
    assert lab.batches == ["A2", "A1", "B3"]
''',
        ),
        after(DOORS, TOY_LINE, '"generate hi --model $toy $few --scheduler alone" = "."\n'),
        after("docs/architecture.md", "## Scheduling", "\n`alone` runs one request at a time.\n"),
    ),
    (
        "tests/sched/test_alone.py",
        "tests/doors/test_commands.py::test_each_door_is_opened",
        "tests/test_settings.py",
        "tests/docs/test_generated.py",
        "tests/test_same_tokens.py::test_greedy_tokens_equal_generate[gpt2-12-heads-1-alone]",
    ),
)

ORDERING = Walk(
    "an ordering",
    (
        Edit(
            "orca_jax/sched/orderings/prompts.py",
            '''"""Order by prompt, the shortest first."""

from orca_jax.sched.orderings.base import KeyOrdering
from orca_jax.sched.request import Request


class ShortestPrompt(KeyOrdering):
    """The arrival plus half a second for each token of the prompt, the lowest first."""

    def key(self, request: Request, now: float) -> tuple[float, ...]:
        """The arrival, later by the prompt."""
        return (request.arrival + 0.5 * len(request.prompt_ids),)
''',
        ),
        after(
            "orca_jax/values/config.py",
            '    "priority": Named("orca_jax.sched.orderings.priority:Priority", "priority"),',
            '    "prompts": Named("orca_jax.sched.orderings.prompts:ShortestPrompt", "prompts"),\n',
        ),
        after(
            "tests/sched/test_orderings.py",
            '    "fcfs reads no urgency": ("fcfs", 1, "A p9 1+1, B ann 1+1, C d1 1+1", "A1|B1|C1"),',
            '    "a short prompt first": ("prompts", 1, "A - 6+1, B - 1+1", "B1|A6"),\n',
        ),
        after(
            DOORS, TOY_LINE, '"generate hi --model $toy $few --scheduling-policy prompts" = "."\n'
        ),
        after(
            "docs/operations.md",
            "- `fcfs`: the order of arrival. No request is overtaken.",
            "- `prompts`: the shortest prompt first.\n",
        ),
    ),
    (
        "tests/sched/test_orderings.py",
        "tests/doors/test_commands.py::test_each_door_is_opened",
        "tests/sched/test_cost.py",
        "tests/test_settings.py",
        "tests/docs/test_generated.py",
        "tests/serve/test_deploy.py::test_orders_are_as_told",
    ),
)

FAMILY = Walk(
    "a model family",
    (
        after(
            "orca_jax/model/families/types.txt",
            "kimi_k25                     -     -      -   -    -   -        -    -"
            "          -        -    -  Kimi_K25*: Kimi K2.5, for texts alone",
            "knotted=llama                -     -      -   -    -   -        -    -"
            "          -        - tied  Knotted: Knotted\n",
        ),
        Edit(
            "tests/model/recorded/configs/dense.py",
            '''def knotted(draw: Random, number: int) -> Config:
    """Llama under another name."""
    return llama(draw, number)


DENSE: ''',
            "DENSE: ",
        ),
        after("tests/model/recorded/configs/dense.py", "        cwm,", "        knotted,\n"),
    ),
    (
        "tests/model/describe/",
        "tests/model/recorded/test_recorded.py",
        "tests/project/test_floors.py::test_folders_are_small",
        "tests/docs/test_generated.py",
    ),
    program="""
from tests.model.recorded.record import Recorded, load, save

def renamed(model: Recorded) -> Recorded:
    keys = model.config.keys() - {"attention_bias", "mlp_bias"}
    config = {key: model.config[key] for key in keys} | {"model_type": "knotted"}
    if config["tie_word_embeddings"]:
        del config["tie_word_embeddings"]
    return model._replace(config=config)

save("knotted", [renamed(model) for model in load("iquestcoder")[:4]])
""",
)
