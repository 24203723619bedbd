"""Quantised weights as other programs publish them in safetensors: AWQ, GPTQ, compressed-tensors, FP8, NVFP4.

    config.py    the `quantization_config` of a config.json
    tensors.py   the matrices that several tensors make together
    parts.py     checks of these tensors
    matrix.py    what all matrices share
    integers.py  integers with scales and zero points, in 4 or 8 bits
    words.py     the orders of integers in files
    numbers.py   floating-point numbers with scales, in 4 or 8 bits
    load.py      the parameters of a decoder

What a matrix is follows from its tensors.
"""
