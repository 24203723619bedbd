"""Compare speculation with no speculation: tokens per second, and the share of accepted proposals.

Passes with and without speculation take turns on one executor, and both must generate the same tokens. The repetitive
text is a list of records, continued greedily: small models then run in circles. The literary text is prose, continued
by draws at temperature 1: hardly any n-gram occurs twice. A preset has random weights and a tokenizer of bytes, so its
own output is a loop in the first case, and noise in the second one.
"""

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from orca_jax.assembly.built import Built
from orca_jax.assembly.engine import build_engine
from orca_jax.engine import Engine
from orca_jax.flags import add_engine_args, add_number, engine_config_from_args
from orca_jax.helpers.reporting import hardware, print_table
from orca_jax.tools.bench.measure import reschedule
from orca_jax.values.config import EngineConfig
from orca_jax.values.errors import ConfigError
from orca_jax.values.request import SamplingParams
from orca_jax.values.speculation import SpeculativeConfig

ROWS = (1, 8, 32)
DEFAULT = SpeculativeConfig(num_speculative_tokens=4, prompt_lookup_min=2, prompt_lookup_max=4)
_RECORDS = "\n".join(
    f'{{"id": {n}, "name": "item {n}", "price": {n % 7}, "in stock": true}},' for n in range(1, 13)
)
_PROSE = (
    "The prince had come home late in the evening, and walked through the dark garden without looking at the windows.",
    "She put the letter down, rose, and stood for a while before the old mirror that her mother had left to her.",
    "In the first days of October the roads turned to mud, and no news reached the village from either army.",
    "He had never spoken to the count, yet he knew by the way the servants fell silent that this must be him.",
    "What they said at dinner was forgotten by the next morning, except for a single word of the younger brother.",
    "A carriage stopped before the house, the bell rang twice, and an unknown voice asked for the doctor.",
    "Nothing in the whole province was as famous as her garden, and she herself was seldom seen in it.",
    "The old general smiled, took up his glass, looked through it at the candle, and put it back without drinking.",
)


class Text(NamedTuple):
    """A kind of text: the prompts in turn, and the temperature of the answers."""

    prompts: Sequence[str]
    temperature: float


TEXTS: Mapping[str, Text] = {
    "repetitive": Text([f"List {n}:\n{_RECORDS}\n" for n in range(8)], 0.0),
    "literary": Text(_PROSE, 1.0),
}


class SpeculativePass(NamedTuple):
    """One run of all requests."""

    seconds: float
    cpu_seconds: float  # of this process, on all cores
    iterations: int
    tokens: list[tuple[int, ...]]  # of each request
    num_drafts: int
    num_draft_tokens: int
    num_accepted: int


def add_args(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark and of the engine."""
    parser.add_argument(
        "--rows", type=int, nargs="+", default=list(ROWS), metavar="N", help="requests at once"
    )
    parser.add_argument(
        "--texts",
        nargs="+",
        choices=TEXTS,
        default=list(TEXTS),
        help="kinds of text (default: all)",
    )
    add_number(parser, "--output", 128, "tokens of each answer")
    add_number(parser, "--repeat", 5, "passes of each kind")
    add_engine_args(
        parser, without=("trace_file",), model="demo", max_num_seqs=32, speculative_config=DEFAULT
    )


def run(args: argparse.Namespace) -> None:
    """Run all passes; print a table and a line of JSON for each text and number of requests."""
    config = engine_config_from_args(args)
    if config.speculative_config is None:
        raise ConfigError(
            "speculative_config must be given: it is what is measured", param="speculative_config"
        )
    if args.repeat < 1:
        raise ConfigError(f"repeat must be at least 1, got {args.repeat}", param="repeat")
    if max(args.rows) > config.max_num_seqs or min(args.rows) < 1:
        raise ConfigError(
            f"rows must be from 1 to max_num_seqs, {config.max_num_seqs}, got {args.rows}",
            param="rows",
        )
    settings = {**dataclasses.asdict(config), "output": args.output, "repeat": args.repeat}
    with build_engine(config) as built:
        for name in args.texts:
            for rows in args.rows:
                result = compare(built, config, TEXTS[name], rows, args.output, args.repeat)
                print_table(f"{config.model}, {name} text, {rows} requests", result)
                line = {
                    "text": name,
                    "rows": rows,
                    **result,
                    "hardware": hardware(),
                    "config": settings,
                }
                print(json.dumps(line), flush=True)


def compare(
    built: Built, config: EngineConfig, text: Text, rows: int, num_output: int, repeat: int
) -> dict[str, float]:
    """Run passes with and without speculation in turn, after one of each to warm up; medians of tokens per second."""
    plain = dataclasses.replace(config, speculative_config=None)
    drafted = config
    passes: dict[bool, list[SpeculativePass]] = {False: [], True: []}
    for number in range(repeat + 1):
        for is_drafted in (False, True) if number % 2 else (True, False):
            reschedule(built, drafted if is_drafted else plain)
            done = _run(built, text, rows, num_output)
            if number:
                passes[is_drafted].append(done)
    expected = passes[False][0].tokens
    assert all(each.tokens == expected for each in (*passes[False], *passes[True])), (
        "speculation changed a token"
    )
    num_tokens = sum(map(len, expected))
    with_drafts = [num_tokens / each.seconds for each in passes[True]]
    without = [num_tokens / each.seconds for each in passes[False]]
    cpu_with = statistics.median([each.cpu_seconds for each in passes[True]])
    cpu_without = statistics.median([each.cpu_seconds for each in passes[False]])
    num_drafts = sum(each.num_drafts for each in passes[True])
    proposed = sum(each.num_draft_tokens for each in passes[True])
    accepted = sum(each.num_accepted for each in passes[True])
    return {
        "tokens_per_s_ratio": statistics.median(with_drafts) / statistics.median(without),
        "tokens_per_s": statistics.median(with_drafts),
        "tokens_per_s_without": statistics.median(without),
        "cpu_seconds_ratio": cpu_with / cpu_without,
        "iterations": passes[True][-1].iterations,
        "iterations_without": passes[False][-1].iterations,
        "cpu_us_per_iteration": 1e6 * cpu_with / passes[True][-1].iterations,
        "cpu_us_per_iteration_without": 1e6 * cpu_without / passes[False][-1].iterations,
        "acceptance": accepted / proposed if proposed else 0.0,
        "tokens_per_proposal": proposed / num_drafts if num_drafts else 0.0,
        "proposals_per_pass": num_drafts / repeat,
        "accepted_share_of_output": accepted / repeat / num_tokens,
    }


def _run(built: Built, text: Text, rows: int, num_output: int) -> SpeculativePass:
    engine = built.engine
    tokens: list[tuple[int, ...]] = [()] * rows
    for index in range(rows):
        ids = built.tokenizer.encode(text.prompts[index % len(text.prompts)])[
            : built.max_model_len - num_output
        ]
        params = SamplingParams(
            max_tokens=num_output, temperature=text.temperature, seed=index, ignore_eos=True
        )
        engine.add_request(str(index), ids, params)
    cpu = time.process_time()
    before = engine.stats.iterations
    seconds = _drain(engine, tokens)
    cpu = time.process_time() - cpu
    drafts = engine.pool.drafts
    return SpeculativePass(
        seconds,
        cpu,
        engine.stats.iterations - before,
        tokens,
        drafts.num_drafts,
        drafts.num_draft_tokens,
        drafts.num_accepted_tokens,
    )


def _drain(engine: Engine, tokens: list[tuple[int, ...]]) -> float:
    """Step until all requests have ended; returns the seconds."""
    start = time.perf_counter()
    while engine.has_work:
        for update in engine.step():
            tokens[int(update.request_id)] += update.new_ids
    return time.perf_counter() - start
