"""Places and values that stand in the command lines of lines.toml; each is made when a line first needs it."""

import importlib
import io
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from string import Template

from orca_jax import LLM, SamplingParams
from orca_jax.cluster.keys import make_key_file
from orca_jax.cluster.launch import free_ports
from orca_jax.tools.bench.__main__ import main as bench
from orca_jax.tools.convert.__main__ import main as convert
from tests.bench.test_records import SAMPLES as RECORDS
from tests.bench.test_workload_files import AZURE, MOONCAKE
from tests.lora.directories import ADAPTERS
from tests.model.reference import REFERENCE
from tests.project.source import ROOT
from tests.serve.test_address import make_certificate
from tests.simulate.test_tables import written

FEW = "--max-tokens 2 --max-num-seqs 4 --no-progress"
BYTES = f"{FEW} --tokenizer byte --max-num-batched-tokens 16 --num-pages 40 --page-size 8 -tp 1"
NGRAMS = {"method": "ngram", "num_speculative_tokens": 2}
DRAFTS = {"method": "draft_model", "model": str(REFERENCE / "gpt2-12-heads")}
ROW = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "hi"}}

LABELLED = "".join(
    json.dumps({"state": "x" * (n % 7), "type": "yes_no", "question": "Odd?", "answer": n % 2 == 1})
    + "\n"
    for n in range(12)
)

WORDS: Mapping[str, str] = {
    "$few": FEW,
    "$bytes": BYTES,
    "$small": f"--model $gpt2 {BYTES} --raw",
}
"""What stands for several words."""

VALUES: Mapping[str, str] = {
    "toy": "preset:toy",
    "root": str(ROOT),
    "demo": str(ROOT / "checkpoints" / "demo"),
    "gpt2": str(REFERENCE / "gpt2-12-heads"),
    "adapter": str(ADAPTERS / "gpt2-all"),
    "ngrams": json.dumps(NGRAMS),
    "drafts": json.dumps(DRAFTS | {"num_speculative_tokens": 2}),
    "noise": '{"noise": 0.5}',
    "quantum": '{"quantum": 2}',
    "seeded": '{"seed": 1}',
    "cold": '{"temperature": 0.1}',
    "thinking": '{"enable_thinking": false}',
    "two": '{"max_tokens": 2}',
}
TEXTS: Mapping[str, str] = {
    "settings": "max-model-len: 256\nmax_num_seqs: 2\n",
    "empty": "",
    "prompts": "hi\nho\n",
    "rows": json.dumps(ROW) + "\n",
    "azure": AZURE,
    "mooncake": MOONCAKE,
    "recorded": 2 * (RECORDS / "vllm_bench.jsonl").read_text(encoding="utf-8"),
    "template": "{% for message in messages %}{{ message.content }}{% endfor %}",
    "calibration": '{"version": 1, "kinds": {"choice": {"temperature": 2.0}}}',
    "labelled": LABELLED,
    "keys": "k\n",
    "admin": "a\n",
}
"""Files by their text."""


def own_model(path: Path) -> None:
    """Write the model of examples/own_decoder.py."""
    path.mkdir()
    importlib.import_module("examples.own_decoder").save_untrained(path)


def orbax(path: Path) -> None:
    """Write a model as an Orbax checkpoint."""
    assert convert(["--model", VALUES["gpt2"], "--output", str(path)]) == 0


def timeline(path: Path) -> None:
    """Write the timeline of two requests."""
    with LLM("preset:toy", trace_file=str(path), max_num_seqs=2) as llm:
        llm.generate(["hi", "ho"], SamplingParams(max_tokens=3), use_tqdm=False)


def curves(path: Path) -> None:
    """Write the line of a benchmark of schedulers."""
    words = "schedulers --model preset:toy --num-requests 3 --max-num-seqs 2 --load 0.9"
    out = io.StringIO()
    with redirect_stdout(out):
        assert bench([*words.split(), "--schedulers", "orca", "chunked"]) == 0
    path.write_text(out.getvalue().splitlines()[-1], encoding="utf-8")


def tables(path: Path) -> None:
    """Write the measured kernels of a card."""
    path.mkdir()
    written(path)


MAKERS: Mapping[str, Callable[[Path], object]] = {
    "own": own_model,
    "orbax": orbax,
    "trace": timeline,
    "curves": curves,
    "tables": tables,
    "cluster_key": make_key_file,
}
"""Files and folders by their makers."""


class Places(Mapping[str, str]):
    """The values of names in the lines, below one folder. `others` are known from elsewhere."""

    def __init__(self, folder: Path, **others: str) -> None:
        self._folder = folder
        self._known = {**VALUES, "folder": str(folder), **others}

    def __getitem__(self, name: str) -> str:
        if name not in self._known:
            self._known |= self._made(name)
        return self._known[name]

    def having(self, name: str, value: str) -> "Places":
        """These places and one more."""
        return Places(self._folder, **{name: value})

    def _made(self, name: str) -> dict[str, str]:
        path = self._folder / f"{name}.made"
        if name in ("certificate", "key"):
            return dict(
                zip(("certificate", "key"), make_certificate(self._folder, "one"), strict=True)
            )
        if name == "port":
            return {name: str(free_ports())}
        if name in MAKERS:
            MAKERS[name](path)
        else:
            path.write_text(TEXTS[name], encoding="utf-8")
            path.chmod(0o600)
        return {name: str(path)}

    def __iter__(self) -> Iterator[str]:
        return iter((*self._known, *TEXTS, *MAKERS))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def filled(self, words: list[str]) -> list[str]:
        """The words of a line with their values; a word may stand for several."""
        return [Template(word).substitute(self) for word in spread(words)]


def spread(words: list[str]) -> list[str]:
    """The words of a line with several words for those of `WORDS`."""
    found = [part for word in words for part in WORDS.get(word, word).split(" ")]
    return found if found == words else spread(found)
