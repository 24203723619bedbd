"""`python -m lab COMMAND [flags]`: measurements around the package; `--help` lists them."""

import sys
from collections.abc import Collection, Sequence

from orca_jax.flags import FlagParser, run_program
from orca_jax.tools.bench.commands import Command, command_parser, run_command

COMMANDS = {
    "baselines": Command(
        "lab.reproduce.baselines", "earlier and later schedulers with the paper's 175B and workload"
    ),
    "batch": Command(
        "lab.batch", "overhead of a batch file over the same requests sent to the engine directly"
    ),
    "batch_memory": Command("lab.batch_memory", "peak memory of batch runs of different lengths"),
    "beyond": Command(
        "lab.paper.beyond", "tails, sensitivities and later schedulers with the paper's workload"
    ),
    "capacity": Command(
        "lab.capacity", "requests of each length that one start holds, with windows"
    ),
    "control": Command(
        "lab.control_plane", "plans to another process by ZeroMQ and by a collective"
    ),
    "decisions_benches": Command(
        "lab.decisions.benches", "jevbench and sys1bench against a server with a real model"
    ),
    "decisions_beside": Command(
        "lab.decisions.beside", "time and changes of decisions beside the server of vLLM"
    ),
    "decisions_flips": Command(
        "lab.decisions.flips", "flips and calibration errors of decisions on public texts"
    ),
    "decisions_reference": Command(
        "lab.decisions.reference", "probabilities of decisions beside those of transformers"
    ),
    "decisions_work": Command(
        "lab.decisions.work", "time of many questions beside one prompt, and beside chats"
    ),
    "files": Command("lab.peers.files", "speed beside llama.cpp on the same GGUF files"),
    "fit": Command(
        "lab.paper.held_out", "fit one pair of shares to 101B and 341B, to predict 175B"
    ),
    "foresight": Command(
        "lab.length_prediction", "latency with each length predictor, on word problems"
    ),
    "held_out": Command(
        "lab.simulated.held_out", "record runs, and predict held-out ones by a fitted simulator"
    ),
    "gpus": Command(
        "lab.gpus.command", "recorded runs of GPUs repeated in virtual time from measured kernels"
    ),
    "gpu_tables": Command(
        "lab.gpus.left_out", "errors between the points of measured kernels, by left out grid lines"
    ),
    "host": Command("lab.host_time", "host time and device idle time per iteration"),
    "install": Command(
        "lab.install", "time of an installation from the source tree, and the size of the wheel"
    ),
    "judges": Command(
        "lab.judges.command", "clients, agents and tools of others against the server"
    ),
    "kv_restart": Command(
        "lab.kv_restart", "the first token of a known prompt after the process was killed"
    ),
    "kv_tiers": Command("lab.kv_tiers", "bytes per second of pages in memory and in files"),
    "lora": Command("lab.lora.command", "cost of adapters in one batch", "lab.lora.flags"),
    "lowered": Command(
        "lab.lowered", "the lowered text of all programs, to compare two versions of the code"
    ),
    "overlay": Command(
        "lab.reproduce.overlay", "draw all figures over the paper's points on one page"
    ),
    "pages": Command(
        "lab.pages.command", "write the numbers of the pages again, from the recorded results"
    ),
    "paper_real": Command("lab.real.command", "the paper's Figures 9, 10 and 11 on a real engine"),
    "peers": Command(
        "lab.peers.command", "throughput and latency beside other engines on the same requests"
    ),
    "parts": Command("lab.device_parts", "shares of device time of the parts of the model"),
    "plan_messages": Command("lab.hosts.control", "time to send plans to workers"),
    "predict": Command(
        "lab.simulated.predict", "predict a recorded run from another one, and print the errors"
    ),
    "prefix": Command("lab.prefix_reuse", "hit rate, gain and cost of prefix caching"),
    "products": Command(
        "lab.quantisation.products",
        "products of a few tokens with plain and quantised matrices",
        "lab.quantisation.products_flags",
    ),
    "quantised": Command(
        "lab.quantisation.quantised",
        "quality, speed and memory of quantised weights and KV caches",
        "lab.quantisation.quantised_flags",
    ),
    "reproduce": Command(
        "lab.reproduce.command",
        "the paper's Figures 8 to 11 and Table 1, and later papers, with a verdict each",
    ),
    "retention": Command(
        "lab.retention.command", "published retentions of prefixes on equal loads in virtual time"
    ),
    "restarts": Command(
        "lab.restarts.command", "engines killed under load, each answer compared with a calm one"
    ),
    "scheduler_cost": Command(
        "lab.scheduler_cost", "the host's time for each request, by scheduler and ordering"
    ),
    "sampling": Command(
        "lab.smollm2.sampling",
        "sampling defaults of a chat model, by its answers to common questions",
    ),
    "shelf": Command("lab.shelf.command", "published schedulers on equal loads in virtual time"),
    "soak": Command(
        "lab.smollm2.soak",
        "mixed calls to a server on a real model for half an hour, each answer checked",
    ),
    "speculation": Command(
        "lab.speculation.command",
        "speculation against none: tokens per second and accepted proposals",
    ),
    "what_if": Command(
        "lab.gpus.what_if", "the years since the paper, one change after another, from kernels"
    ),
    "whatif": Command("lab.reproduce.whatif", "Figure 10 with other numbers and other seeds"),
    "workers": Command("lab.workers", "throughput of a pipeline over its iterations in flight"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Return its exit status."""
    return run_command(make_parser, argv)


def make_parser(names: Collection[str] = tuple(COMMANDS)) -> FlagParser:
    """Return the parser of all commands, with the flags of those in `names`; only their modules are imported."""
    parser = FlagParser("python -m lab", description="Measurements around the package.")
    return command_parser(parser, COMMANDS, names)


if __name__ == "__main__":
    sys.exit(run_program("python -m lab", main))
