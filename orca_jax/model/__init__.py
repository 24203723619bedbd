"""One pre-norm decoder, its weights, and where they live on a mesh.

    describe      what a model is: config.json, presets (no JAX needed)
    families/     how each family of checkpoints spells its configuration and its weights (no JAX needed)
    layers        linear, norm, table: matrix products in the parameters' type, the rest in float32
    rope          rotary positions and their scaling kinds
    attention, transformer    the decoder
    sharding      the table: logical axis -> mesh axis
    load, weights, checkpoint  parameters from a Hugging Face directory, an Orbax checkpoint, or nothing

Importing this package imports no JAX, so that a front end may read a model's description.
"""
