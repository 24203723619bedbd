"""Writes a workload as a file of Mooncake's format, for a repetition or for other clients."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from orca_jax.helpers.reporting import write_file
from orca_jax.tools.bench.workload.files import MOONCAKE_BLOCK
from orca_jax.tools.bench.workload.generate import WorkloadRequest
from orca_jax.values.errors import ConfigError, reason_of

_KEY_LENGTH = 8  # first ids of a block, to find those that may be equal


@dataclass
class _NamedBlock:
    """A block of 512 ids, or the known beginning of one."""

    ids: tuple[int, ...]
    name: int


class BlockNames:
    """Names blocks of prompts by numbers. Two prompts share a name if they agree up to the end of the block.

    A partly filled block has the name of a longer one that begins alike.
    """

    def __init__(self) -> None:
        self._found: dict[tuple[int, ...], list[_NamedBlock]] = {}
        self._count = 0

    def of(self, prompt_ids: Sequence[int]) -> list[int]:
        """Return the names of the blocks of a prompt."""
        names: list[int] = []
        for start in range(0, len(prompt_ids), MOONCAKE_BLOCK):
            ids = tuple(prompt_ids[start : start + MOONCAKE_BLOCK])
            names.append(self._name(names[-1] if names else -1, ids))
        return names

    def _name(self, before: int, ids: tuple[int, ...]) -> int:
        candidates = self._found.setdefault((before, *ids[:_KEY_LENGTH]), [])
        for block in candidates:
            length = min(len(block.ids), len(ids))
            if block.ids[:length] == ids[:length]:
                block.ids = max(block.ids, ids, key=len)
                return block.name
        candidates.append(_NamedBlock(ids, self._count))
        self._count += 1
        return candidates[-1].name


def write_mooncake(path: str, workload: Sequence[WorkloadRequest]) -> None:
    """Write arrivals, in whole milliseconds, lengths, and the blocks of the prompts.

    Raises:
        ConfigError: the file cannot be written; `param` is "write_trace".
    """
    names = BlockNames()
    rows = [
        {
            "timestamp": round(1e3 * request.arrival),
            "input_length": len(request.prompt_ids),
            "output_length": request.num_output,
            "hash_ids": names.of(request.prompt_ids),
        }
        for request in workload
    ]
    try:
        write_file(path, "".join(json.dumps(row) + "\n" for row in rows).encode())
    except OSError as error:
        raise ConfigError(
            f"write_trace {path!r} cannot be written: {reason_of(error)}", param="write_trace"
        ) from error
