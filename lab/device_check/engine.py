"""Runs the engine as a user has it: the server once, and `LLM` on the trace; kernels are tested by its own start."""

import importlib.util
import json
import logging
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from lab.device_check.part import Found, Setting, Write, attempt
from lab.device_check.trace import throughput, trace_of
from orca_jax.tools.bench.workload.generate import WorkloadRequest

NEEDED = ("llguidance", "msgspec", "shtab", "starlette", "structlog", "uvicorn", "zmq")
MODEL = "demo"
PROMPT = "Once there was"
SERVER_SECONDS = 75  # for its start; the part has twice as much
STOP_SECONDS = 15
# few programs: a start takes less
SIZES = {"max_num_batched_tokens": 128, "max_num_seqs": 32, "max_model_len": 1024}


def engine(what: str, setting: Setting, write: Write) -> None:
    """Serve the demo model and ask it once, then generate with `LLM`: by the demo model, and by the preset `what`."""
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        write(skipped=f"{', '.join(missing)} not installed")
        return
    attempt(write, partial(serve_once, setting), system="server", model=MODEL)
    attempt(write, partial(generate, setting, MODEL, {}), system="LLM", model=MODEL)
    if not setting.dry_run:
        attempt(
            write, partial(generate, setting, f"preset:{what}", SIZES), system="LLM", model=what
        )


def serve_once(setting: Setting) -> Found:
    """Start the server, and ask it for a completion and for the results of its self-test."""
    start = time.perf_counter()
    with running_server(setting.work) as url:
        found: Found = {"start_s": time.perf_counter() - start}
        asked = {"model": MODEL, "prompt": PROMPT, "max_tokens": 16, "temperature": 0}
        body = json.dumps(asked).encode()
        answer = fetch(Request(f"{url}/v1/completions", body, {"content-type": "application/json"}))
        found |= {
            "text": answer["choices"][0]["text"],
            "output_tokens": answer["usage"]["completion_tokens"],
        }
        tests = fetch(Request(f"{url}/health")).get("attention_self_test", {})
        found["self_test"] = (
            ", ".join(f"{name} {result}" for name, result in tests.items()) or "none"
        )
    return (
        found if found["text"].strip() else {**found, "error": "the server answered without text"}
    )


@contextmanager
def running_server(work: Path) -> Iterator[str]:
    """The address of a server of the demo model; it ends with the block. Raises RuntimeError: it does not start."""
    log = work / "engine-server.log"
    options = ["--host", "127.0.0.1", "--port", "0"]
    command = [
        sys.executable,
        "-m",
        "orca_jax.serve",
        "--model",
        MODEL,
        "--compile-cache",
        programs_of(work),
    ]
    with log.open("wb") as out:
        process = subprocess.Popen([*command, *options], stdout=out, stderr=out)
    try:
        yield address(process, log)
    finally:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def programs_of(work: Path) -> str:
    """The directory of compiled programs of a run."""
    return str(work / "engine")


def address(process: "subprocess.Popen[bytes]", log: Path) -> str:
    """Wait for the server's line with its address. Raises RuntimeError with the last line if none comes."""
    deadline = time.monotonic() + SERVER_SECONDS
    text = ""
    while time.monotonic() < deadline and process.poll() is None:
        text = log.read_text(encoding="utf-8", errors="replace")
        if found := re.search(r"^Serving .* on (https?://\S+:\d+)$", text, re.MULTILINE):
            return found[1]
        time.sleep(0.1)
    last = (text.strip().splitlines() or ["no output"])[-1]
    raise RuntimeError(f"the server is not ready after {SERVER_SECONDS} s, or has ended: {last}")


def fetch(request: Request) -> Any:
    """The JSON of an answer."""
    with urlopen(request, timeout=30) as response:
        return json.load(response)


def generate(setting: Setting, model: str, sizes: dict[str, Any]) -> Found:
    """Start `LLM`, generate a text, and run the trace; a compilation meanwhile is an error."""
    import jax

    from orca_jax import LLM, SamplingParams

    lines: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("orca_jax.assembly.engine")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    start = time.perf_counter()
    llm = LLM(model=model, progress=False, compile_cache=programs_of(setting.work), **sizes)
    try:
        found: Found = {"start_s": time.perf_counter() - start, "line": lines[-1]}
        if jax.default_backend() != setting.kind and not setting.dry_run:
            return {**found, "error": f"it runs on {jax.default_backend()}"}
        (output,) = llm.generate(
            PROMPT, SamplingParams(max_tokens=16, temperature=0.0), use_tqdm=False
        )
        found["text"] = output.outputs[0].text

        def run(trace: list[WorkloadRequest]) -> int:
            params = [
                SamplingParams(max_tokens=each.num_output, temperature=0.0, ignore_eos=True)
                for each in trace
            ]
            outputs = llm.generate(
                [list(each.prompt_ids) for each in trace], params, use_tqdm=False
            )
            return sum(len(each.outputs[0].token_ids) for each in outputs)

        found |= throughput(trace_of(llm.tokenizer.vocab_size, setting.dry_run), run)
        late = llm.engine.executor.stats.compiles_while_serving
        return {**found, "error": f"{late} programs were compiled while serving"} if late else found
    finally:
        logger.removeHandler(handler)
        llm.close()
