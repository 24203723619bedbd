"""The bundled demo model: small, complete, and readable on any mesh that divides it. Its answers end by themselves."""

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from orca_jax.model.describe import read_model_config
from orca_jax.model.load import load_decoder
from tests.model.reference import PADDED, logits, mesh_of

DEMO = Path(__file__).parents[2] / "checkpoints" / "demo"
PROMPT = "<|user|>Tom has 5 apples. He buys 3 more. How many apples does Tom have?<|assistant|>"


def test_it_is_small_and_described() -> None:
    assert sum(path.stat().st_size for path in DEMO.rglob("*") if path.is_file()) < 20e6
    card = (DEMO / "README.md").read_text()
    assert all(source in card for source in ("GSM8K", "Shakespeare", "Standard Ebooks", "MIT", "ublic domain"))
    assert (DEMO / "loss.png").is_file() and (DEMO / "chat_template.jinja").is_file()


def test_its_parts_agree() -> None:
    config, tokenizer = read_model_config(DEMO), Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    assert config.vocab_size == tokenizer.get_vocab_size()
    assert config.eos_token_ids == (tokenizer.token_to_id("<|end|>"),)
    assert json.loads((DEMO / "tokenizer_config.json").read_text())["model_max_length"] == config.max_positions == 1024
    text = "It's 12+30=42, naïve “quotes” and 漢字.\n"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


@pytest.mark.parametrize("devices", [1, 4])
def test_it_learnt_that_an_answer_ends(devices: int) -> None:
    decoder = load_decoder(DEMO, dtype="float32", mesh=mesh_of(devices))
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    ids = np.asarray(tokenizer.encode(f"{PROMPT}He has 8.\n#### 8").ids)
    assert len(ids) <= PADDED
    last = logits(decoder, ids)[-1]
    probabilities = np.exp(last - last.max())
    assert probabilities[decoder.config.eos_token_ids[0]] / probabilities.sum() > 0.2
