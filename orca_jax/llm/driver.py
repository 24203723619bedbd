"""Methods of `LLM` for trainers, by the names of vLLM: new weights, pauses, and sleep."""

from collections.abc import Sequence
from typing import Any

from orca_jax.assembly.built import Built
from orca_jax.link.changes.asked import SLEEP_TAGS
from orca_jax.link.wire import PauseMode, SleepTag
from orca_jax.llm.arguments import check_version, config_errors
from orca_jax.llm.loras import LoadedAdapters
from orca_jax.llm.turns import Turns
from orca_jax.values.lora_request import AdapterTree


class DrivenLLM:
    """The base class of `LLM`, with the methods of trainers."""

    _built: Built
    _turns: Turns
    _loras: LoadedAdapters

    def update_params(
        self, params: Any, version: int | None = None, *, abort_all_requests: bool = False
    ) -> int:
        """Replace the weights without compiling anything, and return their version, which outputs carry.

        Requests of open iterators finish first, with the old weights, and the prefix cache is emptied. So no output
        has tokens of two versions, unless a pause keeps it. The arrays are copied: the caller may donate them
        afterwards.

        Args:
            params: a state or module of `flax.nnx`, nested dicts, or the path of an Orbax checkpoint.
            version: number of the new weights; None: the next one. Weights at the start have 0.
            abort_all_requests: end open requests with the reason "abort" instead.

        Raises:
            ConfigError: the weights cannot be replaced, or a CheckpointError with all problems; they are unchanged.
        """
        self._turns.check_usable()
        check_version(version)
        put = self._built.prepare_update(params)
        return self._turns.update_weights(
            lambda: put(lambda: None), version, aborts=abort_all_requests
        )

    def update_lora(self, lora_name: str, params: Any, lora_alpha: float) -> int:
        """Load an adapter from a tree, or replace it. Returns the version of later outputs.

        Open requests keep the matrices with which they began. Nothing but those of the adapter is copied.

        Args:
            lora_name: the name for `LoRARequest(lora_name)`.
            params: a tree of Tunix with `nnx.LoRAParam`; its other parameters are not read.
            lora_alpha: the factor on both matrices is `lora_alpha` / rank.

        Raises:
            RequestError: the adapter does not fit, or cannot be loaded; the one in use is unchanged.
        """
        return self._loras.update(lora_name, AdapterTree(params, lora_alpha))

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache, and return True, as vLLM does. Pages of `kv_disk` stay.

        Requests of open iterators go on with their pages, which no other request finds.

        Raises:
            EngineError: the engine has failed or was closed.
        """
        self._turns.forget_prefixes()
        return True

    def pause_generation(self, *, mode: PauseMode = "abort", clear_cache: bool = True) -> None:
        """Let calls of other threads wait until `resume_generation`; return when the pause has begun.

        Arguments and errors are those of `AsyncLLM.pause_generation`. A call of the same thread would wait for ever.
        """
        with config_errors():
            self._turns.pause(mode, clear_cache=clear_cache)

    def resume_generation(self) -> None:
        """End the pause: calls that waited go on. Raises ConfigError during sleep, and EngineError."""
        with config_errors():
            self._turns.resume()

    def is_paused(self) -> bool:
        """True between `pause_generation` and `resume_generation`."""
        return self._turns.pauses.is_on

    def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """Free the devices' memory until `wake_up`; calls of other threads wait.

        Arguments and errors are those of `AsyncLLM.sleep`.
        """
        with config_errors():
            self._turns.sleep(level, mode)

    def wake_up(self, tags: Sequence[SleepTag] | None = None) -> None:
        """Put back the weights, the pages ("kv_cache"), or both; with all of it there, calls that waited go on.

        Raises:
            ConfigError: a tag does not exist, or the weights were dropped.
            EngineError: the engine has failed or was closed.
        """
        with config_errors():
            self._turns.wake_up(SLEEP_TAGS if tags is None else tags)

    def is_sleeping(self) -> bool:
        """True while weights or pages are not on the devices."""
        return bool(self._turns.pauses.sleep.asleep)
