"""The checks of `scripts/gpu_check` and `scripts/tpu_check`: correct kernels, and speed against the chip's limits.

__main__.py   the command line; the process of one part
runner.py     the parts of each kind of device, one process each, and the report
part.py       the settings of a part, and the writer of its measurements
rates.py      the time of a program and of its kernels, and the best rates of the device
loads.py      batches of attention, and the implementations by name
correct.py    kernels against the oracle
speed.py      kernels alone: bytes and operations per second
tune.py       other sizes of their blocks, and counters of the card
steps.py      whole iterations of a model
profile.py    their kernels by time
variants.py   iterations under other options of the compiler
serving.py    the engine on the paper's trace
engine.py     the server and `LLM`, as a user has them
trace.py      the paper's trace, for all systems
peer.py       transformers on the same trace
tables.py     results as tables
stand_in.py   stand-ins for jaxtyping's names if it is not installed
"""
