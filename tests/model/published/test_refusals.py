"""What the `quantization_config` of other programs may say, and tensors that fit no matrix."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orca_jax.model.describe import read_model_config
from orca_jax.model.load import load_decoder
from orca_jax.model.published.config import METHODS, read_stored_form
from orca_jax.values.errors import CheckpointError, ConfigError
from orca_jax.values.layer_config import StoredForm
from tests.model.published.directories import FORMS, compressed, write
from tests.model.reference import mesh_of

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
PACKED = compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=128)


@pytest.mark.parametrize(
    ("config", "form"),
    [
        (GPTQ, StoredForm("gptq", 4, 128, zero_offset=1)),
        ({**GPTQ, "checkpoint_format": "gptq_v2"}, StoredForm("gptq", 4, 128)),
        ({**GPTQ, "group_size": -1}, StoredForm("gptq", 4, 0, zero_offset=1)),
        (
            {**GPTQ, "desc_act": True, "bits": 8, "damp_percent": 0.1, "lm_head": False},
            StoredForm("gptq", 8, 128, zero_offset=1, is_ordered=True),
        ),
        ({**AWQ, "modules_to_not_convert": ["lm_head"]}, StoredForm("awq", 4, 128)),
        (
            {"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "zero_point": True},
            StoredForm("awq", 4, 64),
        ),
        (PACKED, StoredForm("scaled", 4, 128)),
        (
            compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
            StoredForm("scaled", 8, has_integers=False),
        ),
        (
            {"quant_method": "fp8", "weight_block_size": [128, 64], "activation_scheme": "dynamic"},
            StoredForm("scaled", 8, 64, has_integers=False, block=(128, 64)),
        ),
        (
            {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
            StoredForm("scaled", 8, has_integers=False),
        ),
        (
            {"quant_method": "modelopt", "quant_algo": "NVFP4", "producer": {"name": "modelopt"}},
            StoredForm("scaled", 4, has_integers=False),
        ),
    ],
)
def test_forms(config: dict[str, Any], form: StoredForm) -> None:
    assert read_stored_form(config) == form


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({}, "quant_method None is not read, only awq"),
        ({"quant_method": "hqq"}, "quant_method 'hqq'"),
        ({"quant_method": ["gptq"]}, "quant_method ['gptq']"),
        ({"quant_method": "bitsandbytes"}, "save_pretrained('PLAIN')"),
        ({**GPTQ, "bits": 3}, "bits 3"),
        ({**GPTQ, "bits": True}, "bits True"),
        ({**GPTQ, "group_size": 0}, "group_size 0"),
        ({**GPTQ, "group_size": 2**40}, "group_size"),
        ({**GPTQ, "desc_act": "no"}, "desc_act 'no'"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        ({**GPTQ, "dynamic": {"-:.*": {}}}, "dynamic"),
        ({**GPTQ, "rotation": "hadamard"}, "'rotation' is unknown for gptq"),
        ({**AWQ, "bits": 8}, "bits 8"),
        ({**AWQ, "version": "gemv"}, "version 'gemv'"),
        ({**AWQ, "zero_point": False}, "zero_point False"),
        ({**PACKED, "format": "marlin-24"}, "format 'marlin-24'"),
        ({**PACKED, "quantization_status": "frozen"}, "quantization_status"),
        ({**PACKED, "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        ({**PACKED, "transform_config": {"config_groups": {"u": {}}}}, "transform_config"),
        ({**PACKED, "config_groups": []}, "config_groups []"),
        ({**PACKED, "config_groups": {"group_0": {}}}, "weights None"),
        (compressed("pack-quantized", num_bits=3, type="int"), "weights.num_bits 3"),
        (compressed("int-quantized", num_bits=8, type="int", dynamic=True), "weights.dynamic"),
        (compressed("int-quantized", num_bits=8, type="int", rounding="up"), "weights.rounding"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt 'e5m2'"),
        ({"quant_method": "fp8", "weight_block_size": [0, 1]}, "weight_block_size [0, 1]"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8"}, "quant_algo 'W4A8'"),
    ],
)
def test_refusals_name_the_key(config: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_stored_form(config)
    assert caught.value.param == "quantization_config"
    assert named in caught.value.message


def test_every_method_is_read_by_a_test() -> None:
    """A method that nothing reads in the tests would be a promise alone."""
    read = {config["quant_method"] for config, _ in FORMS.values()}
    assert METHODS.keys() == read


@pytest.mark.parametrize(
    ("form", "changes", "named"),
    [
        ("gptq", {"scales": None}, "q_proj.weight: scales is missing"),
        ("gptq", {"g_idx": None}, "g_idx is missing, and config.json has desc_act true"),
        ("gptq", {"g_idx": np.full(64, 9, np.int32)}, "names groups from 9 to 9"),
        ("gptq", {"qweight": np.zeros((8, 64), np.int8)}, "qweight has the type I8"),
        ("gptq", {"scales": np.zeros((3, 64), np.float16)}, "scales has the shape [3, 64]"),
        ("gptq", {"bias": np.ones(64, np.float16)}, "q_proj.bias: unexpected"),
        ("awq", {"qzeros": np.zeros((2, 7), np.int32)}, "qzeros has the shape [2, 7]"),
        ("packed", {"weight_shape": np.array([64, 63], np.int64)}, "do not fill"),
        ("packed", {"weight_shape": np.array([2**40, 64], np.int64)}, "has no 64 x 8 words"),
        ("int8", {"weight_scale": np.zeros((5, 1), np.float32)}, "do not fit a matrix 64 x 64"),
        ("int8", {"weight_scale": None}, "type I8 is not supported"),
        ("nvfp4", {"weight_scale_2": np.zeros(3, np.float32)}, "must be one number"),
    ],
)
def test_tensors_that_fit_no_matrix_are_named(
    tmp_path: Path, form: str, changes: dict[str, np.ndarray | None], named: str
) -> None:
    of_layer = {f"model.layers.0.self_attn.q_proj.{name}": each for name, each in changes.items()}
    published, _ = write(tmp_path, "llama", form, changes=of_layer)
    with pytest.raises(CheckpointError) as caught:
        load_decoder(published, dtype="float32", mesh=mesh_of(1))
    assert named in caught.value.message


def test_the_form_is_a_part_of_the_configuration(tmp_path: Path) -> None:
    published, _ = write(tmp_path, "llama", "awq")
    path = published / "config.json"
    config = json.loads(path.read_text())
    assert read_model_config(published).stored == StoredForm("awq", 4, 32)
    config["quantization_config"] = "awq"
    path.write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="quantization_config must be an object, got 'awq'"):
        read_model_config(published)
