"""Routes that change a running server: weights and prefix cache, with keys of their own, and adapters, as in vLLM."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import cast, get_args

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route, request_response

from orca_jax.link.changes.asked import SLEEP_TAGS
from orca_jax.link.errors import LinkError
from orca_jax.link.wire import PauseMode, SleepTag
from orca_jax.serve.access import Access, read_key_file
from orca_jax.serve.handlers import read_request, report_ignored
from orca_jax.serve.models import json_response
from orca_jax.serve.openai.errors import ApiError, api_error
from orca_jax.serve.openai.model import Service
from orca_jax.serve.openai.schema.admin import (
    UpdatedWeights,
    load_parser,
    unload_parser,
    update_weights_parser,
)
from orca_jax.server_config import ServerConfig
from orca_jax.values.checks import adapter_name_fault
from orca_jax.values.errors import ConfigError, RequestError


def admin_routes(service: Service, config: ServerConfig) -> list[Route]:
    """Build the routes, if the server has keys for them. They accept these keys alone.

    Raises:
        ConfigError: the file of keys or the folder cannot be used.
    """
    if config.admin_key_file is None:
        return []
    keys = read_key_file(Path(config.admin_key_file), "admin_key_file")
    assert config.weights_root is not None, "the flags were checked"
    root = Path(config.weights_root)
    if not root.is_dir():
        raise ConfigError(f"{root} is not a directory", param="weights_root")
    return [
        Route(path, Access(request_response(partial(answer, service)), keys, ()), methods=[method])
        for (method, path), answer in _ANSWERS.items()
    ]


async def _reset(service: Service, request: Request) -> Response:
    """Empty the prefix cache of the devices. Raises ApiError for a wish that would be ignored."""
    for name, value in request.query_params.items():
        if value.lower() != "false":
            raise ApiError(400, f"{name} must be false: running requests and files are kept", name)
    await _asked(service, service.client.changes.reset_prefix_cache())
    return Response()


async def _pause(service: Service, request: Request) -> Response:
    """Let new calls wait. Raises ApiError for an unknown mode or parameter."""
    wanted = {"mode": "abort", "clear_cache": "true", **request.query_params}
    choices = {"mode": get_args(PauseMode), "clear_cache": ("true", "false")}
    _check_choices(wanted, choices)
    mode = cast(PauseMode, wanted["mode"])
    clear_cache = wanted["clear_cache"] == "true"
    await _asked(service, service.client.changes.pause(mode, clear_cache=clear_cache))
    return JSONResponse({"status": "paused"})


async def _resume(service: Service, _: Request) -> Response:
    """Let the calls that waited begin. Raises ApiError."""
    await _changed(service, service.client.changes.resume())
    return JSONResponse({"status": "resumed"})


async def _is_paused(service: Service, _: Request) -> Response:
    return JSONResponse({"is_paused": service.client.changes.is_paused})


async def _sleep(service: Service, request: Request) -> Response:
    """Free the devices. Raises ApiError for an unknown parameter or value."""
    wanted = {"level": "1", "mode": "abort", **request.query_params}
    choices = {"level": ("1", "2"), "mode": ("abort", "wait")}
    _check_choices(wanted, choices)
    level = int(wanted["level"])
    mode = cast(PauseMode, wanted["mode"])
    await _changed(service, service.client.changes.sleep(level, mode))
    return Response()


async def _wake_up(service: Service, request: Request) -> Response:
    """Put back what `tags` names, or everything. Raises ApiError."""
    for name in request.query_params:
        if name != "tags":
            raise ApiError(400, f"{name} is unknown; use tags", name)
    tags = request.query_params.getlist("tags") or list(SLEEP_TAGS)
    await _changed(service, service.client.changes.wake_up(cast(list[SleepTag], tags)))
    return Response()


async def _is_sleeping(service: Service, _: Request) -> Response:
    return JSONResponse({"is_sleeping": bool(service.client.changes.asleep)})


def _check_choices(wanted: Mapping[str, str], choices: Mapping[str, Sequence[str]]) -> None:
    """Raise ApiError for an unknown parameter of a route, or for another value than these."""
    for name, value in wanted.items():
        if name not in choices:
            raise ApiError(400, f"{name} is unknown; use {' and '.join(choices)}", name)
        if value not in choices[name]:
            raise ApiError(400, f"{name} must be one of {', '.join(choices[name])}", name)


async def _asked[T](service: Service, change: Awaitable[T]) -> T:
    """The result of a change of the engine. Raises ApiError if it has ended."""
    try:
        return await change
    except LinkError as error:
        raise api_error(error, service.config.overload_status) from None


async def _changed(service: Service, change: Awaitable[None]) -> None:
    """Make a change of the engine. Raises ApiError if it has ended, or refuses it."""
    try:
        await _asked(service, change)
    except RequestError as error:
        raise ApiError(400, error.message, error.param) from None


async def _update(service: Service, request: Request) -> Response:
    """Replace the weights, and answer when new requests get the new ones. Raises ApiError."""
    call, ignored, _ = await read_request(request, update_weights_parser, service)
    assert service.config.weights_root is not None, "the flags were checked"
    source = _folder(Path(service.config.weights_root).resolve(), call.model_path)
    if source is None:
        raise ApiError(
            400, "model_path must be a folder below that of --weights-root", "model_path"
        )
    aborts = bool(call.abort_all_requests)
    update = service.client.update_weights(str(source), call.weight_version, aborts=aborts)
    try:
        version = await _asked(service, update)
    except RequestError as error:
        raise ApiError(
            400, error.message, "model_path" if error.param == "model" else error.param
        ) from None
    answer = UpdatedWeights(
        success=True, message="the weights were replaced", weight_version=version
    )
    return json_response(answer, headers=report_ignored(service, ignored))


_ANSWERS: Mapping[tuple[str, str], Callable[[Service, Request], Awaitable[Response]]] = {
    ("POST", "/update_weights_from_disk"): _update,
    ("POST", "/reset_prefix_cache"): _reset,
    ("POST", "/pause"): _pause,
    ("POST", "/resume"): _resume,
    ("GET", "/is_paused"): _is_paused,
    ("POST", "/sleep"): _sleep,
    ("POST", "/wake_up"): _wake_up,
    ("GET", "/is_sleeping"): _is_sleeping,
}
ADMIN_CALLS = frozenset([*_ANSWERS, *[(method, f"{path}/") for method, path in _ANSWERS]])
"""Methods and paths that keys of callers do not open."""


def _folder(root: Path, name: str) -> Path | None:
    """The folder below `root`, with links followed; None if there is none."""
    try:
        path = (root / name).resolve()
        return path if path.is_relative_to(root) and path.is_dir() else None
    # too long, with a null character, or a loop of links
    except (OSError, ValueError, RuntimeError):
        return None


def adapter_routes(service: Service) -> list[Route]:
    """Build the routes that change the adapters; none without `--lora-dir`."""
    folder = service.config.lora_dir
    if folder is None:
        return []
    return [
        Route(
            "/v1/load_lora_adapter",
            partial(_load, service, Path(folder).resolve()),
            methods=["POST"],
        ),
        Route("/v1/unload_lora_adapter", partial(_unload, service), methods=["POST"]),
    ]


async def _load(service: Service, folder: Path, request: Request) -> Response:
    call, ignored, _ = await read_request(request, load_parser, service)
    fault = adapter_name_fault(call.lora_name)
    if fault is not None:
        raise ApiError(400, f"lora_name {fault}", "lora_name")
    path = _inside(folder, call.lora_path)
    note = await service.load_adapter(call.lora_name, str(path))
    text = f"Success: LoRA adapter '{call.lora_name}' added successfully."
    if note:
        text += f" Note: {note}."
    return PlainTextResponse(text, headers=report_ignored(service, ignored))


async def _unload(service: Service, request: Request) -> Response:
    call, ignored, _ = await read_request(request, unload_parser, service)
    await service.unload_adapter(call.lora_name)
    text = f"Success: LoRA adapter '{call.lora_name}' removed successfully."
    return PlainTextResponse(text, headers=report_ignored(service, ignored))


def _inside(folder: Path, given: str) -> Path:
    """The directory of an adapter, by its path in `--lora-dir` or from the root. Raises ApiError."""
    try:
        path = (folder / given).resolve()
        if path != folder and path.is_relative_to(folder) and path.is_dir():
            return path
    # too long, with a null character, or a loop of links
    except (OSError, ValueError, RuntimeError):
        pass
    raise ApiError(400, "lora_path must be a directory inside the server's --lora-dir", "lora_path")
