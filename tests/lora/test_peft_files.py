"""Adapters of PEFT: the results of PEFT with recorded adapters, and refusals that name the reason."""

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from orca_jax.model.describe import read_model_config
from orca_jax.model.load import load_decoder
from orca_jax.model.lora.launch import Adapters
from orca_jax.model.lora.peft_files import AdapterValues, read_adapter
from orca_jax.model.lora.stacks import groups_of, value_shapes, write_slot, zero_values
from orca_jax.model.sharding import on_shards
from orca_jax.values.config import LoraConfig, ModelConfig
from orca_jax.values.errors import CheckpointError
from tests.lora.directories import ADAPTERS, LLAMA, RECORDED, write_adapter
from tests.model.reference import REFERENCE, dense_attention, mesh_of

LORA = LoraConfig(num_slots=2, max_rank=4)


def model_of(name: str) -> ModelConfig:
    return read_model_config(str(REFERENCE / name))


def read(directory: Path, name: str = LLAMA, lora: LoraConfig = LORA) -> AdapterValues:
    return read_adapter(directory, model_of(name), lora, "float32")


def refusal(directory: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        read(directory)
    return str(error.value)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compiles")
@pytest.mark.parametrize("name", RECORDED)
def test_logits_equal_those_of_peft(name: str) -> None:
    base, expected = REFERENCE / RECORDED[name], np.load(ADAPTERS / name / "expected.npz")
    model, mesh = model_of(RECORDED[name]), mesh_of(1)
    decoder = load_decoder(str(base), dtype="float32", mesh=mesh)
    found = read(ADAPTERS / name, RECORDED[name])
    zeros = {
        key: each[:, None] if each.ndim > 1 else each[None]
        for key, each in zero_values(model, LORA, "float32").items()
    }
    stacks = {
        key: jnp.concatenate([jnp.asarray(each)] * 3, axis=1 if each.ndim > 2 else 0)
        for key, each in zeros.items()
    }
    stacks = write_slot(
        stacks, jnp.array([2]), {key: jnp.asarray(each) for key, each in found.values.items()}
    )
    ids = np.load(base / "expected.npz")["ids_2"]
    positions = jnp.arange(len(ids), dtype=jnp.int32)
    attend = dense_attention(model)

    @jax.jit
    def run(ids: jax.Array, stacks: dict[str, jax.Array]) -> jax.Array:
        adapters = Adapters(stacks, groups_of(model), jnp.full(len(ids), 2), mesh)
        hidden, _ = decoder(ids, positions, attend, 0, adapters=adapters)
        return decoder.unembed(hidden)

    logits = np.asarray(run(jnp.asarray(ids), stacks))[:, : model.vocab_size]
    wanted = expected["logits_2"]
    np.testing.assert_allclose(logits, wanted, rtol=0, atol=2e-5 * np.abs(wanted).max())


def test_values_are_padded_scaled_and_of_known_shapes() -> None:
    found, model = read(ADAPTERS / "llama-stabilised"), model_of(LLAMA)
    shapes = {name: shape for name, (shape, _) in value_shapes(model, LORA.max_rank).items()}
    assert {name: each.shape for name, each in found.values.items()} == shapes
    assert found.values["active"].tolist() == [0, 1, 0, 1]
    assert not found.values["query"].any() and not found.values["mlp.shrink"].any()
    tensors = load_file(ADAPTERS / "llama-stabilised" / "adapter_model.safetensors")
    b = tensors["base_model.model.model.layers.1.self_attn.o_proj.lora_B.weight"]
    np.testing.assert_array_equal(found.values["out"][1], b.T * np.float32(2 / 4**0.5))
    assert found.rank == 4 and found.num_bytes == sum(each.nbytes for each in found.values.values())


def test_parts_of_joined_tensors_share_their_first_matrix() -> None:
    found = read(ADAPTERS / "gpt_neox-heads", "gpt_neox-parallel").values
    shrink = found["attention.shrink"]
    np.testing.assert_array_equal(shrink[:, :, :2], shrink[:, :, 4:6])
    tensors = load_file(ADAPTERS / "gpt_neox-heads" / "adapter_model.safetensors")
    b = tensors["base_model.model.gpt_neox.layers.0.attention.query_key_value.lora_B.weight"]
    heads = b.reshape(4, 3, 8, 2) * np.float32(2)  # of each head: query, key, value
    np.testing.assert_array_equal(found["key"][0, :2], heads[:, 1].reshape(32, 2).T)


def test_copies_of_heads_get_the_columns_of_their_head() -> None:
    model = on_shards(model_of(LLAMA), 12)
    assert model.kv_copies == 3
    copied = read_adapter(ADAPTERS / "llama-all", model, LORA, "float32").values["value"]
    plain = read(ADAPTERS / "llama-all").values["value"]
    heads = plain.reshape(*plain.shape[:2], -1, 1, model.head_dim)
    np.testing.assert_array_equal(copied, np.repeat(heads, 3, axis=3).reshape(copied.shape))


def test_digests_follow_the_content(tmp_path: Path) -> None:
    one, same = write_adapter(tmp_path / "one", 1), write_adapter(tmp_path / "same", 1)
    other, scaled = (
        write_adapter(tmp_path / "other", 2),
        write_adapter(tmp_path / "scaled", 1, lora_alpha=1),
    )
    digests = [read(each).digest for each in (one, same, other, scaled)]
    assert digests[0] == digests[1] and len(set(digests)) == 3


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"use_dora": True}, "use_dora 'True' is not supported"),
        ({"bias": "all"}, "bias 'all' is not supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern"),
        ({"alpha_pattern": {"q_proj": 8}}, "alpha_pattern"),
        (
            {"init_lora_weights": "pissa"},
            "init_lora_weights 'pissa' changes the weights of the base model",
        ),
        ({"something_new": 1}, "something_new '1' is not supported"),
        ({"peft_type": "IA3"}, "peft_type 'IA3' is not supported"),
        ({"r": 0}, "r must be an integer of at least 1, got 0"),
        ({"r": 5}, "r 5 is more than max_lora_rank 4; start with a larger --max-lora-rank"),
        ({"lora_alpha": "x"}, "lora_alpha must be a number, got 'x'"),
        ({"use_rslora": 2}, "use_rslora must be true or false"),
    ],
)
def test_refused_settings_are_named(config: dict[str, Any], reason: str, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, 0)
    path = folder / "adapter_config.json"
    path.write_text(
        json.dumps(json.loads(path.read_text(encoding="utf-8")) | config), encoding="utf-8"
    )
    assert reason in refusal(folder)


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_settings_are_read(name: str) -> None:
    assert read(ADAPTERS / name, RECORDED[name]).rank <= LORA.max_rank


Q = "base_model.model.model.layers.0.self_attn.q_proj"
# and others of a Gemma 3 for images
QUERY = "base_model.model.model.language_model.layers.1.self_attn.q_proj"
VISION = "base_model.model.model.vision_tower.vision_model.encoder.layers.0.self_attn.q_proj"
PROJECTOR = "base_model.model.multi_modal_projector.mm_soft_emb"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({f"{Q}.lora_A.weight": None}, "lora_A and lora_B must both be there"),
        (
            {f"{Q}.lora_A.weight": np.zeros((2, 7), np.float32)},
            "lora_A has shape [2, 7], the model and r need [2, 48]",
        ),
        (
            {f"{Q}.lora_B.weight": np.zeros((9, 2), np.float32)},
            "lora_B has shape [9, 2], the model and r need [96, 2]",
        ),
        (
            {f"{Q}.lora_A.weight": np.full((2, 48), np.nan, np.float32)},
            "has values that are not finite",
        ),
        ({f"{Q}.lora_A.weight": np.zeros((2, 48), np.int32)}, "type I32 is not supported"),
        ({f"{Q}.lora_magnitude_vector": np.zeros(96, np.float32)}, "DoRA is not supported"),
        (
            {"base_model.model.lm_head.lora_A.weight": np.zeros((2, 48), np.float32)},
            "adapters of the vocabulary",
        ),
        (
            {
                "base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight": np.zeros(
                    (2, 48), np.float32
                )
            },
            "no linear",
        ),
    ],
)
def test_refused_tensors_are_named(
    changes: dict[str, np.ndarray | None], reason: str, tmp_path: Path
) -> None:
    path = write_adapter(tmp_path, 0) / "adapter_model.safetensors"
    tensors = {
        key: value for key, value in (load_file(path) | changes).items() if value is not None
    }
    save_file(tensors, path)
    assert reason in refusal(tmp_path)


def test_broken_files_are_refused(tmp_path: Path) -> None:
    assert "adapter_config.json: it does not exist" in refusal(tmp_path)
    folder = write_adapter(tmp_path, 0)
    weights = folder / "adapter_model.safetensors"
    whole = weights.read_bytes()
    for content in (b"", b"\xff" * 20, whole[:100], whole[:-8]):
        weights.write_bytes(content)
        assert "adapter_model.safetensors: cannot be read: it" in refusal(folder)
    weights.unlink()
    (folder / "adapter_model.bin").write_bytes(b"")
    assert "only adapter_model.bin: pickles are not read" in refusal(folder)
    (folder / "adapter_config.json").write_text("[]", encoding="utf-8")
    assert "it is not a JSON object" in refusal(folder)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"\\udc00": 1}', r"'utf-8' codec can't encode character '\udc00'"),
        ('{"r":' + "[" * 5000 + "]" * 5000 + "}", "it is nested deeper than 64 levels"),
        (
            json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 10**400}),
            "lora_alpha must be a number, got 1000",
        ),
        ('{"peft_type": "LORA", "r": 2, "r": 4}', "'r' is listed twice"),
        (
            '{"peft_type": "LORA", "r": 2, "lora_alpha": NaN}',
            "lora_alpha must be a number, got nan",
        ),
    ],
)
def test_odd_settings_are_refused_with_their_reason(text: str, reason: str, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, 0)
    (folder / "adapter_config.json").write_text(text, encoding="utf-8")
    assert (
        f"adapter_config.json: {'' if 'lora_alpha' in reason else 'it is not valid: '}{reason}"
        in refusal(folder)
    )


def change_header(folder: Path, change: Callable[[str], str]) -> None:
    """Write another header into the file of an adapter."""
    path = folder / "adapter_model.safetensors"
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = change(data[8:end].decode()).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data[end:])


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (
            "q_proj.lora_A",
            r"q\udc00.lora_A",
            r"its header is damaged: 'utf-8' codec can't encode character '\udc00'",
        ),
        ('{"', '{"a":{},"a":{},"', "its header is damaged: 'a' is listed twice"),
        ("[2,48]", "[2,1e400]", "has a wrong dtype, shape or data_offsets"),
        ("[2,48]", f"[2,{2**63}]", "has a wrong dtype, shape or data_offsets"),
        ("[2,48]", "[-2,-48]", "has a wrong dtype, shape or data_offsets"),
        ("[2,48]", "[2,47]", "has 384 bytes, which are not its shape [2, 47]"),
        ("[2,48]", "[96]", "shape [96] is not that of a matrix"),
    ],
)
def test_odd_headers_are_refused_with_their_reason(
    old: str, new: str, reason: str, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path, 0)
    change_header(folder, lambda header: header.replace(old, new, 1))
    assert reason in refusal(folder)


def test_a_header_is_refused_by_its_size_before_it_is_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_adapter(tmp_path, 0)
    longest = "x" * 250
    change_header(
        folder,
        lambda header: header.replace("{", f'{{"__metadata__":{{"{longest}":"{longest}"}},', 1),
    )
    read(folder)
    change_header(folder, lambda header: header + " " * 31_000_000)
    # parsing it would fail otherwise
    monkeypatch.setattr("orca_jax.model.files.safetensors.json", None)
    assert "and at most 87936 are read" in refusal(folder)


def test_a_file_with_more_data_than_the_model_needs_is_refused_unread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sparse files, which take no space: with a tail, and with tensors of the size that would be left out."""
    path, tensors = write_adapter(tmp_path, 0) / "adapter_model.safetensors", {}
    os.truncate(path, 200 * 2**30)
    monkeypatch.setattr(
        "orca_jax.model.files.stripes.FileMatrix.read_into", lambda *_: pytest.fail("it was read")
    )
    assert "it was cut or changed" in refusal(tmp_path)
    place = 0
    for module, side, shape in (
        (VISION, "A", [2, 2**33]),
        (QUERY, "A", [2, 16]),
        (QUERY, "B", [24, 2]),
    ):
        end = place + 4 * math.prod(shape)
        tensors[f"{module}.lora_{side}.weight"] = {
            "dtype": "F32",
            "shape": shape,
            "data_offsets": [place, end],
        }
        place = end
    header = json.dumps(tensors).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(path, 8 + len(header) + place)
    with pytest.raises(CheckpointError, match="with this r, one of this model has at most"):
        read(tmp_path, "gemma3-with-images")


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
@pytest.mark.parametrize("kind", ["fifo", "device", "directory"])
def test_other_kinds_of_files_are_refused_at_once(name: str, kind: str, tmp_path: Path) -> None:
    path = write_adapter(tmp_path, 0) / name
    path.unlink()
    match kind:
        case "fifo":
            os.mkfifo(path)
        case "device":
            path.symlink_to("/dev/zero")
        case _:
            path.mkdir()
    reason = "Is a directory" if kind == "directory" else "not a regular file"
    assert reason in refusal(tmp_path)


def test_a_file_that_is_cut_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_adapter(tmp_path, 0)
    path = folder / "adapter_model.safetensors"

    def cut(*arguments: Any) -> Any:
        os.truncate(path, path.stat().st_size // 2)
        return zero_values(*arguments)

    # behind the checks, before the values
    monkeypatch.setattr("orca_jax.model.lora.peft_files.zero_values", cut)
    assert "the file ends within the tensor" in refusal(folder)


@pytest.mark.parametrize("language", ["language_model.model.", "model.language_model."])
def test_the_part_for_images_is_left_out_and_named(language: str, tmp_path: Path) -> None:
    model, images = (
        "gemma3-with-images",
        {f"{VISION}.lora_{side}.weight": np.ones((2, 2), np.float32) for side in "AB"},
    )
    images |= {f"{PROJECTOR}.lora_A.weight": np.ones(3, np.int32)}
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2}', encoding="utf-8")
    query = f"base_model.model.{language}layers.1.self_attn.q_proj"
    texts = {
        f"{query}.lora_A.weight": np.ones((2, 16), np.float32),
        f"{query}.lora_B.weight": np.ones((24, 2), np.float32),
    }
    save_file(texts, tmp_path / "adapter_model.safetensors")
    alone = read(tmp_path, model)
    save_file(images | texts, tmp_path / "adapter_model.safetensors")
    whole = read(tmp_path, model)
    assert (alone.left_out, whole.left_out) == ((), ("multi_modal_projector", "vision_tower"))
    assert alone.digest == whole.digest and whole.values["query"][1].any()
    save_file(images, tmp_path / "adapter_model.safetensors")
    with pytest.raises(
        CheckpointError, match="has tensors of multi_modal_projector and vision_tower alone"
    ):
        read(tmp_path, model)


def test_values_too_large_for_the_type_are_refused(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, 0, lora_alpha=1e9)
    with pytest.raises(CheckpointError, match="too large for float16"):
        read_adapter(folder, model_of(LLAMA), LORA, "float16")
