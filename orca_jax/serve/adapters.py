"""`POST /v1/load_lora_adapter` and `POST /v1/unload_lora_adapter`, as in vLLM."""

from functools import partial
from pathlib import Path

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from orca_jax.checks import adapter_name_fault
from orca_jax.openai.errors import ApiError
from orca_jax.openai.model import Service
from orca_jax.openai.schema.adapters import load_parser, unload_parser
from orca_jax.serve.handlers import read_request, report_ignored


def adapter_routes(service: Service) -> list[Route]:
    """Build the routes that change the adapters; none without `--lora-dir`."""
    folder = service.config.lora_dir
    if folder is None:
        return []
    return [
        Route("/v1/load_lora_adapter", partial(_load, service, Path(folder).resolve()), methods=["POST"]),
        Route("/v1/unload_lora_adapter", partial(_unload, service), methods=["POST"]),
    ]


async def _load(service: Service, folder: Path, request: Request) -> Response:
    call, ignored = await read_request(request, load_parser, service)
    fault = adapter_name_fault(call.lora_name)
    if fault is not None:
        raise ApiError(400, f"lora_name {fault}", "lora_name")
    path = _inside(folder, call.lora_path)
    note = await service.load_adapter(call.lora_name, str(path))
    text = f"Success: LoRA adapter '{call.lora_name}' added successfully." + (f" Note: {note}." if note else "")
    return PlainTextResponse(text, headers=report_ignored(service, ignored))


async def _unload(service: Service, request: Request) -> Response:
    call, ignored = await read_request(request, unload_parser, service)
    await service.unload_adapter(call.lora_name)
    text = f"Success: LoRA adapter '{call.lora_name}' removed successfully."
    return PlainTextResponse(text, headers=report_ignored(service, ignored))


def _inside(folder: Path, given: str) -> Path:
    """The directory of an adapter, by its path in `--lora-dir` or from the root. Raises ApiError."""
    try:
        path = (folder / given).resolve()
        if path != folder and path.is_relative_to(folder) and path.is_dir():
            return path
    except (OSError, ValueError, RuntimeError):  # too long, with a null character, or a loop of links
        pass
    raise ApiError(400, "lora_path must be a directory inside the server's --lora-dir", "lora_path")
