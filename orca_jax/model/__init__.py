"""One pre-norm decoder, its weights, and their sharding over a mesh.

    describe      the configuration of a model: config.json, presets (no JAX needed)
    families/     names of options and weights in each family of checkpoints (no JAX needed)
    layers        linear, norm, table: matrix products in the parameters' type, the rest in float32
    rope          rotary positions and their scaling kinds
    mixers/       attention and the other token mixers of a layer
    block, loops, transformer    the decoder: a layer, the ways of running the layers, the whole
    sharding      the table: logical axis -> mesh axis
    load, weights, checkpoint, parameters
                  parameters from a Hugging Face directory, an Orbax checkpoint, or random numbers
    orbax_files   the layouts of Orbax checkpoints (no JAX needed)
    trees/        tables for the trees of other programs (no JAX needed)
    own           decoders from outside this package
    weight_files  the files of weights by their names (no JAX needed)

This package imports no JAX by itself, so that a front end can read a model's description.
"""
