"""Calls whose engine requests have one result each, and no text: embeddings and decisions."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from orca_jax.link.admission import Deadlines
from orca_jax.link.errors import LinkError
from orca_jax.link.wire import Rejected, Submit
from orca_jax.serve.openai.errors import ApiError, api_error
from orca_jax.serve.openai.generation import Receive, end_reason, failure_of, watching
from orca_jax.serve.openai.model import Service
from orca_jax.serve.telemetry.observer import RequestRecord
from orca_jax.values.request import RequestUpdate


@dataclass(frozen=True)
class SingleJob[T]:
    """A prepared call.

    Attributes:
        id: id of the answer.
        endpoint: the route, in metrics and logs.
        requests: the engine's requests, in order.
        deadlines: those of the call.
        read: the result in the last update of a request; None: it has none.
        prompt_param: the field of the call with the prompts.
        count_param: the field that makes several requests.
    """

    id: str
    endpoint: str
    requests: Sequence[Submit]
    deadlines: Deadlines
    read: Callable[[RequestUpdate], T | None]
    prompt_param: str = "input"
    count_param: str = "input"


@dataclass
class Finished[T]:
    """The results of a call in the order of its requests, and the version of the weights that made them."""

    results: list[T]
    num_cached: list[int] = field(default_factory=list)  # tokens of each prompt from the cache
    weight_version: int = 0


class SingleAnswer(NamedTuple):
    """The JSON of an answer, and the version of the weights that made it."""

    body: bytes
    weight_version: int


async def run[T](service: Service, job: SingleJob[T], receive: Receive) -> Finished[T]:
    """Run a call to its end.

    Raises:
        ApiError: the engine refused the call or failed, or a deadline passed.
        ClientGone: the client has disconnected.
    """
    records = {
        request.request_id: service.observer.begin(
            f"{job.id}-{index}", job.endpoint, len(request.prompt_ids)
        )
        for index, request in enumerate(job.requests)
    }
    found: dict[str, tuple[T, int]] = {}
    try:
        async with (
            service.client.open(job.requests, job.deadlines) as call,
            watching(receive, call),
        ):
            while len(found) < len(records):
                found |= _results(await call.receive(), records, job)
            version = call.weight_version or 0
    except LinkError as error:
        _end_all(records.values(), error)
        refusal = api_error(error, service.config.overload_status)
        names = {"n": job.count_param, "prompt": job.prompt_param}
        refusal.param = names.get(refusal.param or "", refusal.param)
        raise refusal from None
    except BaseException as error:
        _end_all(records.values(), error)
        raise
    ordered = [found[name] for name in records]
    results = [result for result, _ in ordered]
    return Finished(results, [number for _, number in ordered], version)


def _results[T](
    updates: Iterable[RequestUpdate | Rejected],
    records: Mapping[str, RequestRecord],
    job: SingleJob[T],
) -> dict[str, tuple[T, int]]:
    """The results in the messages of the engine, by the ids of their requests. Raises ApiError."""
    return {update.request_id: _result(update, records, job) for update in updates}


def _result[T](
    update: RequestUpdate | Rejected, records: Mapping[str, RequestRecord], job: SingleJob[T]
) -> tuple[T, int]:
    if isinstance(update, Rejected):
        is_prompt = update.param in ("prompt", "max_tokens")
        raise ApiError(400, update.message, job.prompt_param if is_prompt else update.param)
    result = job.read(update)
    if result is None or update.finish_reason not in ("stop", "length"):
        raise failure_of(update.error)
    record = records[update.request_id]
    record.take_update(update)
    record.end("stop")
    return result, update.num_cached


def _end_all(records: Iterable[RequestRecord], error: BaseException) -> None:
    for record in records:
        record.end(end_reason(error))
