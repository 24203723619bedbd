"""`orca-jax convert --output-format`: safetensors with transformers' names, plain or in published forms."""

import json
from pathlib import Path

import numpy as np
import pytest
from flax import nnx
from safetensors import safe_open
from safetensors.numpy import save_file

from orca_jax.cli.main import main as command
from orca_jax.model.load import load_decoder
from orca_jax.model.parameters import flat_parameters
from orca_jax.model.transformer import Decoder
from orca_jax.text.template_files import read_templates
from orca_jax.text.tokenizer import load_tokenizer
from orca_jax.tools.convert import files
from orca_jax.tools.convert.args import PublishedFormat
from orca_jax.tools.convert.export import exported
from orca_jax.tools.convert.forms import FORMS
from tests.model.gguf.test_gguf import write as write_gguf
from tests.model.published.directories import LLAMA, MIXTRAL, write
from tests.model.reference import REFERENCE, mesh_of
from tests.model.saved.record import load as load_saved
from tests.model.states.hybrids import write as write_hybrid

MOST_ERROR = {
    "awq": 1 / 15,
    "gptq": 1 / 14,
    "w4a16": 1 / 14,
    "w8a16": 1 / 127,
    "w8a8": 1 / 127,
    "fp8": 1 / 16,
    "fp8-block": 1 / 16,
    "nvfp4": 1 / 6,
}
"""Bounds of the error of a number, as shares of the largest number of a matrix."""


def convert(source: Path, output: Path, *flags: str) -> int:
    return command(["convert", "--model", str(source), "--output", str(output), *flags])


def loaded(folder: Path) -> Decoder:
    return load_decoder(folder, dtype="float32", mesh=mesh_of(1))


def parameters(folder: Path) -> dict[str, np.ndarray]:
    found = flat_parameters(nnx.state(loaded(folder)))
    return {path: np.asarray(values) for path, values in found.items()}


def names_in(folder: Path) -> set[str]:
    with safe_open(folder / "model.safetensors", framework="numpy") as file:
        return set(file.keys())


@pytest.mark.parametrize("form", FORMS)
def test_a_model_in_each_form(tmp_path: Path, form: PublishedFormat) -> None:
    """The matrices of layers are rounded, all else is equal, and the directory is served as it is."""
    _, source = write(tmp_path, "llama", "awq")
    assert convert(source, tmp_path / "out", "--output-format", form) == 0
    quantised = {key for key in names_in(source) if key.removesuffix(".weight").endswith("_proj")}
    assert len(quantised) == 2 * len(LLAMA)
    assert names_in(tmp_path / "out").isdisjoint(quantised) or form in ("w8a8", "fp8", "fp8-block")
    assert (names_in(source) - quantised) <= names_in(tmp_path / "out")
    theirs = parameters(source)
    for path, ours in parameters(tmp_path / "out").items():
        error = np.abs(ours - theirs[path]).max() / np.abs(theirs[path]).max()
        if path.endswith(".kernel"):
            assert 0 < error <= MOST_ERROR[form], path
        else:
            assert error == 0, path


def test_experts_and_routers(tmp_path: Path) -> None:
    """Each expert has matrices of its own; routers stay plain and are listed as such."""
    _, source = write(tmp_path, "mixtral", "awq")
    assert convert(source, tmp_path / "out", "--output-format", "w4a16") == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))
    routers = [f"model.layers.{layer}.block_sparse_moe.gate" for layer in range(2)]
    ignored = ["model.embed_tokens", *routers, "lm_head"]
    assert sorted(config["quantization_config"]["ignore"]) == sorted(ignored)
    found = names_in(tmp_path / "out")
    assert {f"model.layers.1.{name}.weight_packed" for name in MIXTRAL} <= found
    theirs = parameters(source)
    for path, ours in parameters(tmp_path / "out").items():
        error = np.abs(ours - theirs[path]).max() / np.abs(theirs[path]).max()
        assert error <= MOST_ERROR["w4a16"], path


def test_plain_safetensors_are_those_of_the_source(tmp_path: Path) -> None:
    """From safetensors to Orbax and back: the same tensors by the same names."""
    _, source = write(tmp_path, "llama", "awq")
    assert convert(source, tmp_path / "orbax") == 0
    assert convert(tmp_path / "orbax", tmp_path / "out", "--output-format", "safetensors") == 0
    with (
        safe_open(source / "model.safetensors", framework="numpy") as theirs,
        safe_open(tmp_path / "out" / "model.safetensors", framework="numpy") as ours,
    ):
        assert set(ours.keys()) == set(theirs.keys())
        for key in set(theirs.keys()):
            np.testing.assert_array_equal(ours.get_tensor(key), theirs.get_tensor(key), key)


def test_a_published_model_becomes_plain(tmp_path: Path) -> None:
    """Matrices are dequantised, and config.json has no form any more."""
    published, plain = write(tmp_path, "llama", "awq")
    for name, *flags in (("orbax",), ("safetensors", "--output-format", "safetensors")):
        assert convert(published, tmp_path / name, *flags) == 0
        assert "quantization_config" not in json.loads(
            (tmp_path / name / "config.json").read_text()
        )
        theirs = parameters(plain)
        for path, ours in parameters(tmp_path / name).items():
            np.testing.assert_array_equal(ours, theirs[path], path)


def test_several_files_have_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, source = write(tmp_path, "llama", "awq")
    monkeypatch.setattr(files, "MAX_FILE_BYTES", 20_000)
    assert convert(source, tmp_path / "out", "--output-format", "gptq") == 0
    shards = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(shards) > 2
    assert shards[-1] == f"model-{len(shards):05}-of-{len(shards):05}.safetensors"
    assert not list((tmp_path / "out").glob(".*"))
    monkeypatch.undo()
    assert convert(source, tmp_path / "one", "--output-format", "gptq") == 0
    theirs = parameters(tmp_path / "one")
    for path, ours in parameters(tmp_path / "out").items():
        np.testing.assert_array_equal(ours, theirs[path], path)


def test_a_gguf_file_becomes_a_directory(tmp_path: Path) -> None:
    """The tensors have the names of directories; the tokenizer and the template are those of the file."""
    texts = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": ["a", "b", "<|end|>", "ab", "c", "<|eos|>"],
        "token_type": [1, 1, 3, 1, 1, 3],
        "merges": ["a b"],
        "eos_token_id": 5,
        "chat_template": "{{ messages[0].content }}{{ eos_token }}",
    }
    source = write_gguf(tmp_path / "model.gguf", "qwen3", texts=texts)
    out = tmp_path / "out"
    assert convert(source, out, "--output-format", "safetensors") == 0
    assert names_in(out) == names_in(REFERENCE / "qwen3")
    theirs = parameters(source)
    for path, ours in parameters(out).items():
        np.testing.assert_array_equal(ours, theirs[path], path)
    assert load_tokenizer(out).encode("abc<|end|>") == load_tokenizer(source).encode("abc<|end|>")
    assert load_tokenizer(out).eos_id == load_tokenizer(source).eos_id
    assert read_templates(str(out), None) == read_templates(str(source), None)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ("--quantization", "int8"),
            "--quantization stores weights of Orbax checkpoints; leave it out",
        ),
        (
            (),
            "has no matrix [outputs, inputs] in its layers that fits this form; choose safetensors",
        ),
    ],
)
def test_refusals(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], message: str
) -> None:
    """GPT-2 stores its matrices as [inputs, outputs]."""
    source = REFERENCE / "gpt2-12-heads"
    assert convert(source, tmp_path / "out", "--output-format", "awq", *flags) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_shared_weights_are_written_to_orbax_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "zamba2").mkdir()
    write_hybrid("zamba2-0", tmp_path / "zamba2")
    out = tmp_path / "out"
    assert convert(tmp_path / "zamba2", out, "--output-format", "safetensors") == 2
    assert "layers of zamba2 share weights in safetensors" in capsys.readouterr().err
    assert not out.exists()


TYPES = ("phi3", "mixtral", "cohere", "gpt_neox", "bamba", "falcon_h1", "gpt_oss", "llama4_text")
"""Joined tensors, experts, shared norms, turns, convolutions, factors, and stacks of experts."""


@pytest.mark.parametrize("kind", TYPES)
def test_names_and_values_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    """The tensors that `save_pretrained` writes of a small model, with random values, are read and written again."""
    check_export(tmp_path, kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(load_saved().keys() - {*TYPES, "zamba2"}))
def test_names_and_values_of_all_types(tmp_path: Path, kind: str) -> None:
    check_export(tmp_path, kind)


OTHER_NAMES = {"mistral4", "qwen3_5_moe_text", "qwen3_5_text"}
"""Types whose published files have other names than `save_pretrained`; transformers reads both."""
COMPUTED = ("_decay", "slope_rate")
"""Ends of names of tensors that follow from the configuration."""
UNUSED = {"biogpt.embed_positions.weight": 2, "model.decoder.embed_positions.weight": 2}
"""First rows of tensors that no token has, which are not kept."""


def check_export(folder: Path, kind: str) -> None:
    """Check that what is read is written: for models with images, the tensors of texts by one of their names."""
    record = load_saved()[kind]
    random = np.random.default_rng(3)
    tensors = {
        key: random.normal(0, 1, shape).astype(np.float32) for key, shape in record.shapes.items()
    }
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(record.config), encoding="utf-8")
    written = {each.key: each.read() for each in exported(loaded(folder))}
    if "text_config" in record.config or kind in OTHER_NAMES:
        renamed = folder / "renamed"
        renamed.mkdir()
        rows = {key: np.ascontiguousarray(values) for key, values in written.items()}
        save_file(rows, renamed / "model.safetensors")  # it writes the bytes of a view as they lie
        (renamed / "config.json").write_text(json.dumps(record.config), encoding="utf-8")
        tensors = {each.key: each.read() for each in exported(loaded(renamed))}
    assert written.keys() <= tensors.keys()
    assert not [key for key in tensors.keys() - written.keys() if not key.endswith(COMPUTED)]
    for key, values in written.items():
        ours, theirs = (
            np.atleast_1d(each)[UNUSED.get(key, 0) :] for each in (values, tensors[key])
        )
        if kind == "falcon_h1":
            np.testing.assert_allclose(ours, theirs, rtol=1e-6, err_msg=key)
        else:
            np.testing.assert_array_equal(ours, theirs, err_msg=key)
