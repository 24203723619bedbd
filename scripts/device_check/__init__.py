"""What `scripts/gpu_check` and `scripts/tpu_check` run: are the kernels right, and how near do they come to the chip?

__main__.py   the command line; the process of one part
runner.py     the parts of each kind of device, a process each, and the report
part.py       what a part is told, and how it writes down what it finds
rates.py      how long a program takes; what the device reaches at best
loads.py      batches of attention, and the implementations by name
correct.py    kernels against the oracle
speed.py      kernels alone: bytes and operations a second
steps.py      whole iterations of a model
serving.py    the engine on the paper's trace
trace.py      the paper's trace, for all who serve it
peer.py       transformers on the same trace
tables.py     rows of results for people
stand_in.py   jaxtyping's names where it is not installed
"""
