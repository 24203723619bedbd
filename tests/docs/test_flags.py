"""docs/flags.md has all flags of the server, as its parser has them."""

from scripts.flags_page import PAGES, actions


def test_the_list_has_every_flag() -> None:
    text = PAGES[0].path.read_text(encoding="utf-8")
    flags = [name for _, found in actions() for flag in found for name in flag.option_strings]
    assert len(flags) > 90 and all(f"`{name}`" in text for name in flags)
