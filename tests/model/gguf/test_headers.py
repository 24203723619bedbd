"""Headers of GGUF files: what the library reads, and files that are cut or damaged, named with the damage."""

import os
import struct
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFReader

from orca_jax.helpers.gguf_file.header import read_header
from orca_jax.model.load import load_decoder
from orca_jax.values.errors import CheckpointError
from tests.model.gguf.test_gguf import refused, write
from tests.model.reference import mesh_of

pytestmark = pytest.mark.usefixtures("quick_compiles")  # any correct program will do


@pytest.mark.parametrize("kept", [4, 30, 2000, -1])
def test_a_file_that_was_cut_is_found_by_its_size(tmp_path: Path, kept: int) -> None:
    path = write(tmp_path / "model.gguf", "qwen3")
    whole = path.read_bytes()
    path.write_bytes(whole[:kept])
    message = refused(path)
    assert (
        str(path) in message
        and "cannot be read as GGUF: it" in message
        and "download it again" in message
    )
    path.write_bytes(whole)
    load_decoder(path, dtype="float32", mesh=mesh_of(1))


def test_a_file_that_is_cut_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    """With a mapped file, this test would end the process."""
    path = write(tmp_path / "model.gguf", "llama-12-heads-3-groups")
    with pytest.raises(CheckpointError, match="cannot be read: the file ends within the tensor"):
        load_decoder(
            path,
            dtype="float32",
            mesh=mesh_of(1),
            progress=lambda done, total: os.truncate(path, path.stat().st_size // 9),
        )


HEADER = b"GGUF" + struct.pack("<I", 3)


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"GGUF" + struct.pack(">I", 3), "version 50331648 is not supported"),
        (HEADER + struct.pack("<QQ", 2**63, 0), "its header lists 9223372036854775808 tensors"),
        (HEADER + struct.pack("<QQQ", 0, 1, 2**63), "its header needs 9223372036854775840 bytes"),
        (HEADER + struct.pack("<QQ", 0, 1) + text(b"\xff") + bytes(12), "can't decode byte 0xff"),
        (
            HEADER + struct.pack("<QQ", 0, 2) + (text(b"a") + struct.pack("<IB", 0, 7)) * 2,
            "'a' is listed twice",
        ),
        (
            HEADER + struct.pack("<QQ", 0, 1) + text(b"a") + struct.pack("<I", 99),
            "'a' has the unknown type 99",
        ),
        (
            HEADER + struct.pack("<QQ", 0, 1) + text(b"a") + struct.pack("<IIQ", 9, 9, 1),
            "of the unknown type 9",
        ),
        (
            HEADER + struct.pack("<QQ", 0, 1) + text(b"a") + struct.pack("<IIQ", 9, 8, 2**63),
            "have 9223372036854775808",
        ),
        (
            HEADER
            + struct.pack("<QQ", 1, 0)
            + text(b"t")
            + struct.pack("<IQQQIQ", 3, 1, 0, 9, 0, 0),
            "has no values",
        ),
        (
            HEADER + struct.pack("<QQ", 0, 1) + text(b"a") + struct.pack("<IIQ", 9, 0, 2**63),
            "its header needs 9",
        ),
        (
            HEADER
            + struct.pack("<QQ", 1, 0)
            + text(b"t")
            + struct.pack("<IQQIQ", 2, 2**63, 2**63, 0, 0),
            "tensor 't' ends at",
        ),
        (
            HEADER + struct.pack("<QQ", 1, 0) + text(b"t") + struct.pack("<IQIQ", 1, 33, 2, 0),
            "has 33 columns",
        ),
        (
            HEADER + struct.pack("<QQ", 1, 0) + text(b"t") + struct.pack("<IQIQ", 1, 32, 99, 0),
            "the unknown type 99",
        ),
        (
            HEADER + struct.pack("<QQ", 1, 0) + text(b"t") + struct.pack("<I", 2**31),
            "has 2147483648 dimensions",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_damaged_headers_name_the_damage(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    assert reason in refused(path)


def test_the_header_has_what_the_library_reads(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    long = [f"token {number}" for number in range(5000)]
    write(
        path,
        "qwen3",
        Kind.Q4_0,
        words=["a", "é"],
        numbers=[1, 2],
        share=1e-6,
        flag=True,
        tokens=long,
    )
    found = read_header(path)
    reader = GGUFReader(path)
    for key, field in reader.fields.items():
        if key.startswith("qwen3.") and not key.endswith("tokens"):
            assert found.fields[key] == pytest.approx(field.contents()), key
    assert found.fields["qwen3.tokens"] == "a list of 5000 values"
    assert found.fields["qwen3.share"] == 1e-6
    for tensor in reader.tensors:
        ours = found.tensors[tensor.name]
        assert (
            ours.shape == tuple(reversed(tensor.shape.tolist())) and ours.kind == tensor.tensor_type
        )
        assert ours.begin == tensor.data_offset
        assert ours.row_bytes * int(np.prod(ours.shape[:-1])) == tensor.n_bytes
