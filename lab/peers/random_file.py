"""Random models as GGUF files, quantised by llama.cpp's own program."""

import subprocess
from pathlib import Path

from lab.peers.tokenizer import tokens_and_merges
from orca_jax.errors import OrcaError

TYPES = ("BF16", "Q8_0", "Q4_0", "Q4_K_M")
WIDTH, LAYERS, HEADS, KV_HEADS, INNER, VOCABULARY, POSITIONS = 2048, 12, 32, 4, 5632, 32_000, 32_768
_SEED, _STANDARD_DEVIATION = 0, 0.02


def random_file(kind: str, folder: Path, quantise: Path) -> Path:
    """Return a file of a Llama with 594 million tied random parameters, written at the first use.

    Args:
        kind: one of `TYPES`.
        folder: the place of the files, made if it does not exist.
        quantise: the program `llama-quantize`.

    Raises:
        OrcaError: the program failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    plain, path = folder / "llama-594M-BF16.gguf", folder / f"llama-594M-{kind}.gguf"
    if not plain.exists():
        part = plain.with_suffix(".part")
        _write(part)
        part.rename(plain)
    if not path.exists():
        done = subprocess.run([quantise, plain, path, kind], capture_output=True, text=True, check=False)
        if done.returncode:
            path.unlink(missing_ok=True)
            raise OrcaError(f"llama-quantize ended with code {done.returncode}: {done.stderr[-300:]}")
    return path


def _write(path: Path) -> None:
    """Write the file in bfloat16, with a tokenizer whose text is arbitrary."""
    import gguf  # help comes without both
    import numpy as np

    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(POSITIONS)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    tokens, merges = tokens_and_merges(VOCABULARY)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * VOCABULARY)
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_eos_token_id(VOCABULARY - 1)
    random = np.random.default_rng(_SEED)
    kv = KV_HEADS * (WIDTH // HEADS)
    layer = {
        "attn_q": (WIDTH, WIDTH), "attn_k": (kv, WIDTH), "attn_v": (kv, WIDTH), "attn_output": (WIDTH, WIDTH),
        "ffn_gate": (INNER, WIDTH), "ffn_up": (INNER, WIDTH), "ffn_down": (WIDTH, INNER),
        "attn_norm": (WIDTH,), "ffn_norm": (WIDTH,),
    }  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (VOCABULARY, WIDTH), "output_norm": (WIDTH,)}
    shapes |= {f"blk.{number}.{name}": shape for number in range(LAYERS) for name, shape in layer.items()}
    for name, shape in shapes.items():
        if len(shape) == 1:
            writer.add_tensor(f"{name}.weight", np.ones(shape, np.float32))
            continue
        values = random.standard_normal(shape, np.float32) * np.float32(_STANDARD_DEVIATION)
        kind = gguf.GGMLQuantizationType.BF16
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
