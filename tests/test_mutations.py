"""Mutations change files in all of their ways, and give the same files for the same seed."""

import json
from pathlib import Path
from random import Random

from tests.mutations import mutate_bytes, mutate_json, mutate_safetensors, shrinking

HEADER = json.dumps(
    {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, "__metadata__": {}}
).encode()
FILE = len(HEADER).to_bytes(8, "little") + HEADER + bytes(8)


def test_mutations_follow_their_seed_and_change_the_data() -> None:
    for mutate, data in (
        (mutate_bytes, bytes(99)),
        (mutate_json, HEADER),
        (mutate_safetensors, FILE),
    ):
        some = [mutate(data, Random(seed)) for seed in range(50)]
        assert some == [mutate(data, Random(seed)) for seed in range(50)]
        assert len(set(some)) > 40 and sum(each != data for each in some) > 45


def test_json_stays_json_with_surrogates_and_repeated_keys() -> None:
    texts = [mutate_json(HEADER, Random(seed)) for seed in range(300)]
    pairs: list[list[str]] = []
    for text in texts:
        json.loads(text, object_pairs_hook=lambda found: pairs.append([key for key, _ in found]))
    assert any(len(set(keys)) < len(keys) for keys in pairs)
    assert any(b"\\udc00" in text for text in texts) and any(b"NaN" in text for text in texts)


def test_values_are_damaged_behind_the_header_alone() -> None:
    files = [mutate_bytes(FILE, Random(seed), first=8 + len(HEADER)) for seed in range(50)]
    assert all(file.startswith(FILE[: 8 + len(HEADER)]) for file in files)


def test_a_shrinking_file_is_cut_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(100))
    with shrinking(path, Random(0)):
        pass
    assert path.stat().st_size == 50
