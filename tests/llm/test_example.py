"""The example of a service with `AsyncLLM`."""

from starlette.testclient import TestClient

from examples.async_service import PARAMS, create_service
from tests.sim.oracle import toy_generate


def test_the_service_streams_summaries() -> None:
    with TestClient(create_service(model="preset:toy", max_model_len=256)) as client:
        ids = toy_generate(list(b"abc\n\nIn short:"), PARAMS, vocab_size=257, eos_token_ids=(256,))
        text = (
            bytes(token for token in ids if token < 256)
            .decode(errors="replace")
            .partition("\n\n")[0]
        )
        assert client.post("/summary", content="abc").text == text
        refused = client.post("/summary", content="a" * 500)
        assert refused.status_code == 400 and "tokens" in refused.text
