"""The bundled demo model: small, complete, and readable on any mesh that divides it. Its answers end by themselves."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from orca_jax.llm import LLM
from orca_jax.model.describe import read_model_config
from orca_jax.model.load import load_decoder
from orca_jax.values.request import SamplingParams, StructuredOutput
from tests.covering import slow
from tests.model.reference import PADDED, logits, mesh_of

pytestmark = pytest.mark.usefixtures("quick_compiles")  # any correct program will do

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "checkpoints" / "demo"
CARD_EXAMPLE = re.compile(r"\n(The lamb .* as JSON\.)\n-> (.*)\n")
PROMPT = "<|user|>Tom has 5 apples and buys 3. How many?<|assistant|>5 + 3 = 8."


def test_it_is_small_and_described() -> None:
    assert sum(path.stat().st_size for path in DEMO.rglob("*") if path.is_file()) < 20e6
    card = (DEMO / "README.md").read_text()
    assert all(
        source in card
        for source in ("Generated tasks", "Shakespeare", "Standard Ebooks", "ublic domain")
    )
    assert (DEMO / "loss.png").is_file() and (DEMO / "chat_template.jinja").is_file()


def test_its_card_has_the_shares_of_right_answers() -> None:
    """Word problems, extraction and questions about the engine are right as often as the card promises."""
    rows = re.findall(
        r"^\| (.*) \| ([0-9.]+) % \| (\d+) \|$", (DEMO / "README.md").read_text(), re.MULTILINE
    )
    shares = {name: (float(share), int(count)) for name, share, count in rows}
    for name in ("word problems", "JSON extraction", "questions about the engine"):
        share, count = shares[name]
        assert share >= 95 and count >= 100, name


def test_its_parts_agree() -> None:
    config, tokenizer = read_model_config(DEMO), Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    assert config.vocab_size == tokenizer.get_vocab_size()
    assert config.eos_token_ids == (tokenizer.token_to_id("<|end|>"),)
    assert (
        json.loads((DEMO / "tokenizer_config.json").read_text())["model_max_length"]
        == config.max_positions
        == 1024
    )
    text = "It's 12+30=42, naïve “quotes” and 漢字.\n"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


@pytest.mark.parametrize("devices", [slow(1), 4])
def test_it_learnt_that_an_answer_ends(devices: int) -> None:
    decoder = load_decoder(DEMO, dtype="float32", mesh=mesh_of(devices))
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    ids = np.asarray(tokenizer.encode(f"{PROMPT} Tom has 8 apples.").ids)
    assert len(ids) <= PADDED
    last = logits(decoder, ids)[-1]
    probabilities = np.exp(last - last.max())
    assert probabilities[decoder.config.eos_token_ids[0]] / probabilities.sum() > 0.9


@pytest.mark.slow
def test_it_answers_through_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Held-out tasks, and a request of the card, whose answer stands below it."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from demo.evaluation import evaluate

    names = {name: {"type": "string"} for name in ("pet", "name", "owner")}
    schema = {"type": "object", "properties": {**names, "age": {"type": "integer"}}}
    form = StructuredOutput("json_schema", json.dumps({**schema, "required": [*names, "age"]}))
    params = SamplingParams(temperature=0.0, max_tokens=60, structured=form)
    asked, answered = CARD_EXAMPLE.search((DEMO / "README.md").read_text()).groups()  # type: ignore[union-attr]
    with LLM(
        "demo", dtype="float32", scheduler="chunked", max_num_seqs=16, tensor_parallel_size=1
    ) as llm:
        (answer,) = llm.chat([{"role": "user", "content": asked}], params)
        results = evaluate(llm, 25)
    assert json.loads(answer.outputs[0].text) == json.loads(answered)
    for name in ("word problems", "JSON extraction", "questions about the engine"):
        assert results[name].share >= 0.9, name
