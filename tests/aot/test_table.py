from tests.aot.table import merge_table

PAGE = """before
<!-- tpu: written by the tests -->
| chip | MiB |
| --- | --- |
| v5e | 1 |
| v6e | 2 |
<!-- tpu: end -->
after
"""


def test_rows_of_this_run_replace_theirs_and_the_others_stay() -> None:
    merged = merge_table(PAGE, "tpu", ["chip", "MiB"], 1, [["v6e", "5"], ["tpu7x", "7"]])
    assert merged == PAGE.replace("| v5e | 1 |\n| v6e | 2 |", "| tpu7x | 7 |\n| v5e | 1 |\n| v6e | 5 |")


def test_an_empty_table_is_begun() -> None:
    empty = "<!-- tpu: written by the tests -->\n<!-- tpu: end -->\n"
    assert "| v5e | 1 |" in merge_table(empty, "tpu", ["chip", "MiB"], 1, [["v5e", "1"]])
