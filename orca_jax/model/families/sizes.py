"""Default sizes of the families near Llama: those of the configurations of transformers."""

from collections.abc import Mapping

KEYS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "head_dim",
)
# In the order of the keys. Without a number the size is Llama's, or follows from other sizes.
_TABLE = """
afmoe            200192 2048  6144  -  16  -  16384 128
arcee             32000 2560 18432  -   -  -   4096   -
apertus          131072    - 14336  -   -  -  65536   -
aria_text         32000    -  4096  -   -  -   2048   -
bamba            128000    - 14336  -   -  8 262144   -
cohere           256000 8192 22528 40  64  -   8192   -
cohere2          256000 8192 22528 40  64  -   8192   -
cwm              128256 6144 21504 64  48  8 131072 128
deepseek_v2      102400    - 11008  -   -  -   2048   -
deepseek_v3      129280 7168 18432 61 128  -   4096   -
dots1            152064 4608 10944 62   - 32   2048   -
ernie4_5         103424 1024  3072 18  16  2 131072 128
ernie4_5_moe     103424 2560 12288 28  20  4 131072   -
exaone4          102400    - 16384  -   - 32   2048   -
exaone_moe       102400    - 16384  -   - 32   2048   -
falcon_h1        128000    - 14336  -   -  8   8192   -
flex_olmo        100352    - 11008  -   -  -   4096   -
flint            150144 2048  6144 49   -  4 262144 128
gemma            256000 3072 24576 28  16 16   8192 256
gemma2           256000 2304  9216 26   8  4   8192 256
gemma3_text      262208 2304  9216 26   8  4 131072 256
gemma4_text      262144 2304  9216 30   8  4 131072 256
gemma4_unified_text 262144 2304 9216 30 8 4 262144 256
glm              151552    - 13696 40   -  2 131072 128
glm4             151552    - 13696 40   -  2 131072 128
glm4_moe         151552    - 10944 46  96  8 131072   -
glm4_moe_lite    154880 2048 10240 47  20  - 202752   -
glm4v_moe_text   151424    - 10944 46  96  8  65536   -
glm4v_text       151552    - 13696 40   -  2  32768   -
gpt_oss          201088 2880  2880 36  64  8 131072  64
gptj              50400    - 16384 28  16  -   2048   -
granite_swa      100352 2560  8192 24  20  4   8192   -
helium            48000 2560  7040 24  20 20   4096 128
hunyuan_v1_dense 290943    - 11008  -   -  -   2048   -
hunyuan_v1_moe   290943    - 11008  -   -  -   2048   -
hy_v3            120832    - 13312 80  64  8 131072 128
internlm3        128512    - 10240 48   -  2  32768 128
iquestcoder       76800 5120 27648 80  40  8 131072 128
jais2            150272 3328 26624  -  26  -   8192   -
kimi_k2          129280 7168 18432 61 128  -   4096   -
laguna           100352 2048  8192 40  48  8 131072 128
lfm2              65536 2560 12288  -   -  8 128000   -
lfm2_moe          65536 2048  7168  -   -  8 128000   -
lfm3             128000 2048  7680 24  16  4 128000 128
llama             32000 4096 11008 32  32  -   2048   -
llama4_text      202048 5120  8192 48  40  8 131072 128
mellum            98304 2304  7168 28   -  4 131072 128
minimax           32000    - 14336  -   -  8 131072   -
minimax_m2       200064 3072  1536 62  48  8 196608 128
ministral         32000    - 14336  -   -  8 131072   -
ministral3       131072    - 14336  -   -  8 262144 128
mistral           32000    - 14336  -   -  8 131072   -
mistral4         131072    - 12288 36  32 32 1048576  -
mixtral           32000    - 14336  -   -  8 131072   -
nanochat          50304  768  8192 12   6  -   2048   -
nemotron         256000 6144 24576  -  48  -   4096   -
nemotron_h       131072    - 21504  -   -  8   4096 128
olmo              50304    - 11008  -   -  -   2048   -
olmo2             50304    - 11008  -   -  -   2048   -
olmo3             50304    - 11008  -   -  -   2048   -
olmoe             50304 2048  2048 16  16  -   4096   -
phi               51200 2048  8192 24   -  -   2048   -
phi3              32064 3072  8192  -   -  -   4096   -
phimoe            32064    -  6400  -   -  8 131072   -
qwen2            151936    - 22016  -   - 32  32768   -
qwen2_moe        151936 2048  5632 24  16 16  32768   -
qwen2_vl_text    152064 8192 29568 80  64  8  32768   -
qwen3            151936    - 22016  -   - 32  32768 128
qwen3_5_moe_text 248320 2048  5632 40  16  2  32768 256
qwen3_5_text     248320 4096 12288 32  16  4  32768 256
qwen3_moe        151936 2048  6144 24  32  4  32768   -
qwen3_next       151936 2048  5632 48  16  2  32768 256
qwen3_vl_text    151936    - 22016  -   - 32 128000 128
seed_oss         155136    - 27648 64  80  8 524288 128
smollm3          128256 2048 11008 36  16  4  32768   -
solar_open       196608    - 10240 48  64  8 131072 128
starcoder2        49152 3072 12288 30  24  2   4096   -
vaultgemma       256000 2304  9216 26   8  4   8192 256
youtu            128256 2048  6144  -  16  - 131072   -
"""


def _sizes(row: str) -> tuple[str, Mapping[str, int]]:
    family, *numbers = row.split()
    pairs = zip(KEYS, numbers, strict=True)
    return family, {key: int(number) for key, number in pairs if number != "-"}


SIZES: Mapping[str, Mapping[str, int]] = dict(map(_sizes, _TABLE.strip().splitlines()))
"""By family. Families without a row have the sizes of "llama"."""
