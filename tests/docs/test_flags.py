"""docs/flags.md has all flags of the server, as its parser has them, and docs/vllm.md those of vLLM."""

from collections.abc import Callable
from pathlib import Path

import pytest

from scripts.flags_page import PAGE, VLLM_PAGE, actions, flag_list, renewed, vllm_lists


@pytest.mark.parametrize(("page", "content"), [(PAGE, flag_list), (VLLM_PAGE, vllm_lists)])
def test_the_list_of_flags_is_current(page: Path, content: Callable[[], str]) -> None:
    text = page.read_text(encoding="utf-8")
    assert renewed(text, content()) == text, "run: python scripts/flags_page.py"


def test_the_list_has_every_flag() -> None:
    text = PAGE.read_text(encoding="utf-8")
    flags = [name for _, found in actions() for flag in found for name in flag.option_strings]
    assert len(flags) > 90 and all(f"`{name}`" in text for name in flags)
