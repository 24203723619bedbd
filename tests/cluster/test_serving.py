"""A leader and two workers serve as one process does, and refuse processes that do not belong to them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from orca_jax.cluster.exits import ExitStatus
from orca_jax.cluster.keys import make_key_file
from orca_jax.values.request import SamplingParams
from tests.cluster.hosts import Hosts, errors_of, hosts, start_worker
from tests.serve.running import EOS, VOCAB_SIZE, wait_until
from tests.sim.oracle import toy_generate

PROMPT = "several"


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "cluster.key"
    make_key_file(path)
    return path


@pytest.fixture(scope="module")
def three(key_file: Path) -> Iterator[Hosts]:
    with hosts(3, f"--cluster-key-file={key_file}") as started:
        yield started


def expected(num_tokens: int) -> list[int]:
    params = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
    return toy_generate(list(PROMPT.encode()), params, vocab_size=VOCAB_SIZE, eos_token_ids=(EOS,))


def test_an_answer_is_the_models(three: Hosts) -> None:
    answer = three.server.complete(PROMPT, max_tokens=40, temperature=0, ignore_eos=True).json()
    assert answer["choices"][0]["text"] == bytes(
        each for each in expected(40) if each < 256
    ).decode(errors="replace")


def test_a_constrained_answer(three: Hosts) -> None:
    """The sets of allowed ids reach the workers; a difference would end the cluster."""
    answer = three.server.complete(
        PROMPT, max_tokens=8, temperature=0, structured_outputs={"choice": ["yes", "no"]}
    )
    assert answer.json()["choices"][0]["text"] in ("yes", "no")
    assert three.server.health().status_code == 200


def test_a_stream_and_an_abort(three: Hosts) -> None:
    with three.server.stream(PROMPT, max_tokens=15000, ignore_eos=True) as events:
        for _, _ in zip(events, range(20), strict=False):
            pass
    three.server.wait_idle()


def test_a_second_process_of_a_rank_is_refused_by_name(three: Hosts) -> None:
    late = start_worker(*three.flags, "--node-rank=1")
    text = errors_of(late)
    assert late.returncode == ExitStatus.CONFIG
    assert (
        "--node-rank: the leader has refused this process: rank 1 has joined the cluster already"
        in text
    )
    assert "it is complete, so start all processes again" in text
    assert three.server.health().status_code == 200


def test_another_key_is_refused_by_name(three: Hosts, tmp_path: Path) -> None:
    other = tmp_path / "other.key"
    make_key_file(other)
    flags = [flag for flag in three.flags if not flag.startswith("--cluster-key-file")]
    strangers = {
        "the leader has another key, or none": start_worker(
            *flags, "--node-rank=1", f"--cluster-key-file={other}"
        ),
        "needs --cluster-key-file, also on one machine": start_worker(*flags, "--node-rank=1"),
    }
    for reason, stranger in strangers.items():
        text = errors_of(stranger)
        assert stranger.returncode == ExitStatus.CONFIG
        assert reason in text
    wait_until(lambda: any("wrong cluster key" in line for line in three.server.errors))
    assert three.server.health().status_code == 200


def test_an_answer_ends_before_a_drained_server(key_file: Path) -> None:
    """All processes get the signal at once, as from Kubernetes; the workers wait for the leader."""
    with hosts(2, f"--cluster-key-file={key_file}") as two:
        with two.server.stream(PROMPT, max_tokens=1000, temperature=0, ignore_eos=True) as events:
            next(events)
            for process in (*two.workers, two.server.process):
                process.terminate()
            *_, last = events
        assert last["choices"][0]["finish_reason"] == "length", "the answer is whole"
        assert two.leader_status() == ExitStatus.DONE
        assert two.statuses() == [ExitStatus.DONE]
