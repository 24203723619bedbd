"""Measures a server with inference-perf, a client of kubernetes-sigs, and prints a summary as JSON.

    python -m lab peers --online --clients inference-perf

runs this program for each server, in an environment that it makes. By hand:

    pip install inference-perf==0.7.0
    python -m lab.peers.programs.inference_perf --base-url http://localhost:8000 --model DIR --rate 1 --seconds 60

The settings are in `inference_perf.json`: Poisson arrivals, and lengths as in the paper's workload. Prompts are random
text of the model's own tokenizer, so DIR has a tokenizer.json. "Normalized time per output token" is the end-to-end
latency by output tokens, the paper's metric; times are in milliseconds here. Counts of tokens are the server's own.
"""

import argparse
import importlib.metadata
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SETTINGS = Path(__file__).with_name("inference_perf.json")


def main() -> None:
    """Run the client and print its summary."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--base-url", required=True, metavar="URL", help="address of the server, without /v1"
    )
    parser.add_argument(
        "--model", required=True, metavar="DIR", help="model directory with a tokenizer"
    )
    parser.add_argument(
        "--served-model-name",
        default="model",
        metavar="NAME",
        help="name in the API (default: model)",
    )
    parser.add_argument(
        "--rate", type=float, default=1.0, metavar="X", help="requests per second (default: 1)"
    )
    parser.add_argument(
        "--seconds", type=int, default=60, metavar="N", help="time of arrivals (default: 60)"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "settings.json"  # YAML includes JSON
        path.write_text(json.dumps(settings(args, folder)), encoding="utf-8")
        program = Path(sys.prefix) / "bin" / "inference-perf"
        command = [sys.executable, str(program), "-c", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        reports = list(Path(folder).rglob("summary_lifecycle_metrics.json"))
        if done.returncode or not reports:
            sys.stderr.write(done.stdout + done.stderr)
            raise SystemExit(
                f"error: inference-perf ended with code {done.returncode}, with {len(reports)} reports"
            )
        print(json.dumps(summary(json.loads(reports[0].read_text(encoding="utf-8")), args)))


def settings(args: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Return the settings for one server."""
    found: dict[str, Any] = json.loads(SETTINGS.read_text(encoding="utf-8"))
    count = max(1, round(args.rate * args.seconds))
    for name in ("input_distribution", "output_distribution"):
        found["data"][name]["total_count"] = count
    found["load"]["stages"] = [{"rate": args.rate, "duration": args.seconds}]
    found["server"] |= {"base_url": args.base_url, "model_name": args.served_model_name}
    found["tokenizer"] = {"pretrained_model_name_or_path": args.model}
    found["storage"] = {"local_storage": {"path": folder}}
    return found


def summary(report: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of a report under the names of our own client."""
    done = report["successes"]
    failed = report["failures"]
    latency = done["latency"]
    return {
        "version": importlib.metadata.version("inference-perf"),
        "rate": args.rate,
        "completed": done["count"],
        "failed": failed["count"],
        "median_normalized_latency_ms": _ms(latency["normalized_time_per_output_token"], "median"),
        "p99_normalized_latency_ms": _ms(latency["normalized_time_per_output_token"], "p99"),
        "median_ttft_ms": _ms(latency.get("time_to_first_token"), "median"),
        "p99_itl_ms": _ms(latency.get("inter_token_latency"), "p99"),
        "output_throughput": done["throughput"]["output_tokens_per_sec"],
        "mean_input_tokens": done["prompt_tokens"]["mean"],
        "mean_output_tokens": done["output_tokens"]["mean"],
    }


def _ms(values: dict[str, float] | None, name: str) -> float | None:
    return None if not values or values.get(name) is None else 1e3 * values[name]


if __name__ == "__main__":
    main()
