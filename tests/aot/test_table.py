import pytest

from tests.aot.table import MEASURED, merge_table, read_rows

PAGE = """before

| chip | MiB |
| --- | --- |
| v5e | 1 |
| v6e | 2 |
"""


def test_rows_of_this_run_replace_theirs_and_the_others_stay() -> None:
    merged = merge_table(PAGE, ["chip", "MiB"], 1, [["v6e", "5"], ["tpu7x", "7"]])
    assert merged == PAGE.replace(
        "| v5e | 1 |\n| v6e | 2 |", "| tpu7x | 7 |\n| v5e | 1 |\n| v6e | 5 |"
    )


def test_a_page_without_a_table_gets_one() -> None:
    assert merge_table("before\n\n", ["chip", "MiB"], 1, [["v5e", "1"]]).endswith(
        "\n\n" + PAGE[8:].split("| v6e")[0]
    )


@pytest.mark.parametrize("name", ["aot-gpu", "aot-tpu", "cycles"])
def test_pages_hold_what_a_run_writes(name: str) -> None:
    text = (MEASURED / f"{name}.md").read_text(encoding="utf-8")
    header = (
        next(line for line in text.splitlines() if line.startswith("| ")).strip("| ").split(" | ")
    )
    assert merge_table(text, header, 3, []) == text
    assert {len(row) for row in read_rows(text)} == {len(header)}
