"""The blocks that are run: by a test of their page, or one after the other by test_run.py; the rest says why not."""

from tests.docs.pages import SHELL, Block

RUN_BY = {"docs/quickstart.md": "tests/project/test_quickstart.py"}
NOT_RUN = {  # all blocks of these pages
    "docs/benchmarks.md": "measurements of minutes to hours; tests/bench and tests/lab run the commands on the toy",
    "docs/paper.md": "measurements of minutes to hours; tests/lab/test_reproduce.py runs the commands on less",
    "docs/peers.md": "a measurement, and it installs other engines",
    "docs/deployment.md": "needs containers, several hosts or Ray; tests/deploy and tests/cluster have the rest",
    "docs/measured/aot-gpu.md": "a test itself",
    "docs/measured/aot-stages.md": "a test itself",
    "docs/measured/aot-tpu.md": "a test itself",
    "docs/measured/cycles.md": "compiles for minutes; tests/aot runs it",
    "docs/measured/layers.md": "compiles for minutes; tests/aot runs it",
    "docs/measured/roofline.md": "compiles for minutes; tests/aot runs it",
    "checkpoints/demo/README.md": "training of hours; tests/demo/test_train_demo.py trains for some steps",
    "checkpoints/demo_length_ranker/README.md": "training, from recorded answers; tests/ranker trains on fewer",
}


def is_program(block: Block) -> bool:
    """True if a block could be run."""
    return block.language == "python" or block.language in SHELL


def is_run(block: Block) -> bool:
    """True if test_run.py has to run a block."""
    return (
        is_program(block)
        and block.mark is None
        and block.page not in NOT_RUN
        and block.page not in RUN_BY
    )
