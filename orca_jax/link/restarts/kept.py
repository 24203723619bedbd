"""The open requests of a front end during a restart of its engine: what the next engine needs to go on with them."""

import dataclasses
import random
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from orca_jax.link.wire import Submit
from orca_jax.values.request import RequestMetrics, RequestUpdate
from orca_jax.values.resumed import Resumed

MOST_LOSSES = 2  # of engines in a row, without an id of the request in between


@dataclass(eq=False, slots=True)
class KeptRequest:
    """One request, and its delivered ids."""

    submit: Submit
    path: str | None  # of its adapter
    ids: list[int] = field(default_factory=list)
    metrics: RequestMetrics | None = None  # delivered with the first ids
    losses: int = 0  # engines since the last id

    def again(self) -> Submit:
        """The request for the next engine: it goes on after the delivered ids."""
        if self.metrics is None:
            return self.submit
        return msgspec.structs.replace(self.submit, resumed=Resumed(tuple(self.ids), self.metrics))


class KeptRequests:
    """The open requests of an engine. All methods belong to the client's event loop.

    Args:
        seed: seeds the seeds of requests without one. An engine with this seed draws the same ones.
        adapters: the paths of the loaded adapters, by name.
    """

    def __init__(self, seed: int, adapters: Mapping[str, str]) -> None:
        self._adapters = adapters
        self._seeds = random.Random(seed)
        self._open: dict[str, KeptRequest] = {}

    def keep(self, submit: Submit) -> Submit:
        """Keep a request until `forget`. Returns it with a seed, which the next engine needs too."""
        seed = self._seeds.getrandbits(63)
        if submit.params.seed is None:
            params = dataclasses.replace(submit.params, seed=seed)
            submit = msgspec.structs.replace(submit, params=params)
        self._open[submit.request_id] = KeptRequest(submit, self._path(submit))
        return submit

    def hear(self, update: RequestUpdate) -> None:
        """Note what is delivered of an open request."""
        kept = self._open[update.request_id]
        kept.ids.extend(update.new_ids)
        kept.metrics = kept.metrics or update.metrics
        kept.losses = 0

    def forget(self, request_id: str) -> None:
        """Drop a request that has ended; do nothing if it is not kept."""
        self._open.pop(request_id, None)

    def lost(self) -> list[str]:
        """Count the end of an engine; return the ids of the requests that cannot go on in another one.

        A request that has lost `MOST_LOSSES` engines may be the cause, and would end each of them. The adapter of
        another one may have been replaced under its name.
        """
        lost = []
        for request_id, kept in self._open.items():
            kept.losses += 1
            if kept.losses > MOST_LOSSES or kept.path != self._path(kept.submit):
                lost.append(request_id)
        return lost

    def again(self) -> list[Submit]:
        """The requests for a new engine, in the order of their arrival."""
        return [kept.again() for kept in self._open.values()]

    def _path(self, submit: Submit) -> str | None:
        """The path of the adapter of a request."""
        return None if submit.adapter is None else self._adapters.get(submit.adapter)
