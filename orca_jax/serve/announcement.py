"""The text of a ready server on standard output."""

import shlex

import msgspec

from orca_jax.server_config import ServerConfig
from orca_jax.values.startup import EngineSummary


def announcement(config: ServerConfig, url: str, summary: EngineSummary | None) -> str:
    """Return the address, a call to try, and a line about the engine."""
    name = config.names[0]
    body = {"model": name, "prompt": "Once upon a time", "max_tokens": 64, "stream": True}
    data = shlex.quote(msgspec.json.encode(body).decode())
    options = ""
    if config.uds is not None:
        options += f" --unix-socket {shlex.quote(config.uds)}"
    if config.ssl_certfile is not None:
        options += f" --cacert {shlex.quote(config.ssl_certfile)}"
    if config.api_key or config.api_key_file is not None:
        options += " -H 'authorization: Bearer YOUR-KEY'"
    lines = [
        f"Serving {name} on {url}",
        f"curl -gN{options} {url}/v1/completions -H 'content-type: application/json' -d {data}",
    ]
    if config.has_playground:
        lines.append(f"playground in the browser: {url}/")
    if summary is not None:
        lines.append(summary.line(config.engine.model))
    return "\n".join(lines)
