"""The walks of a sampling field, a route and a metric."""

from tests.project.rows.walk import Edit, Walk, after

SAMPLING_FIELD = Walk(
    "a sampling field",
    (
        after(
            "orca_jax/serve/openai/schema/sampling.py",
            '    min_p: Annotated[float, within(RANGES["min_p"])] | None = None',
            '    sharpness: Annotated[float, within(RANGES["sharpness"])] | None = None\n',
        ),
        after(
            "orca_jax/serve/openai/schema/fields.toml",
            "[SamplingFields]",
            'sharpness = "Factor on all logits. Default 1."\n',
        ),
        after(
            "orca_jax/values/request.py",
            '    "min_p": Range(0, 1),',
            '    "sharpness": Range(0, 8, excludes_low=True),\n',
        ),
        after(
            "orca_jax/values/request.py",
            "    repetition_penalty: float = 1.0",
            "    sharpness: float = 1.0  # factor on all logits, after the penalties\n",
        ),
        Edit(
            "orca_jax/values/request.py",
            "        return self.has_penalty or self.sharpness != 1 or bool(self.logit_bias)",
            "        return self.has_penalty or bool(self.logit_bias)",
        ),
        Edit(
            "orca_jax/values/request.py",
            '"frequency_penalty", "repetition_penalty", "sharpness"):',
            '"frequency_penalty", "repetition_penalty"):',
        ),
        after(
            "orca_jax/exec/rows.py",
            '    repetition: Float[Array, " B"]',
            '    sharpness: Float[Array, " B"]\n',
        ),
        after(
            "orca_jax/exec/rows.py",
            '    "repetition": Column(lambda row: row.params.repetition_penalty, neutral=1),',
            '    "sharpness": Column(lambda row: row.params.sharpness, neutral=1),\n',
        ),
        Edit(
            "orca_jax/exec/sampling/adjust.py",
            "    logits = logits * extras.sharpness[:, None]\n    return jnp.where(_allowed(",
            "    return jnp.where(_allowed(",
        ),
        Edit(
            "orca_jax/sim/toy_logits.py",
            "    return params.has_penalty or params.sharpness != 1 or bool(params.logit_bias)",
            "    return params.has_penalty or bool(params.logit_bias)",
        ),
        Edit(
            "orca_jax/sim/toy_logits.py",
            "    return [params.sharpness * logit for logit in logits]\n\n\ndef first_allowed(",
            "    return logits\n\n\ndef first_allowed(",
        ),
        after(
            "tests/openai/test_parameters.py",
            '    ("min_p", 0.125, 0.125),',
            '    ("sharpness", 2.0, 2.0),\n',
        ),
        Edit(
            "tests/openai/test_parameters.py",
            '@pytest.mark.conforms("chat.max_tokens", "chat.sharpness", "completions.sharpness")',
            '@pytest.mark.conforms("chat.max_tokens")',
        ),
        Edit(
            "tests/openai/messages/test_fields.py",
            '"messages.top_k", "messages.min_p", "messages.sharpness")',
            '"messages.top_k", "messages.min_p")',
        ),
        Edit(
            "tests/openai/responses/test_parameters.py",
            '"responses.structured_outputs", "responses.vllm_xargs", "responses.sharpness")',
            '"responses.structured_outputs", "responses.vllm_xargs")',
        ),
        after(
            "tests/exec/sampling/test_adjust.py",
            "    repetition: float = 1.0",
            "    sharpness: float = 1.0\n",
        ),
        after(
            "tests/exec/sampling/test_adjust.py",
            "        out[token] -= list(row.generated).count(token) * row.frequency + row.presence",
            "    out *= row.sharpness\n",
        ),
        after(
            "tests/exec/sampling/test_adjust.py",
            "    Row([1, 2, 3, 3, 999], [4, 5, 4], repetition=1.8),",
            "    Row([1, 2, 3], [4, 5, 4], presence=0.7, sharpness=3.0),\n",
        ),
    ),
    (
        "tests/openai/test_parameters.py",
        "tests/openai/messages/test_fields.py",
        "tests/openai/responses/test_parameters.py",
        "tests/exec/sampling/test_adjust.py",
        "tests/sim",
        "tests/serve/test_conformance.py",
        "tests/docs/test_generated.py",
    ),
)

ROUTE = Walk(
    "a route",
    (
        Edit(
            "orca_jax/serve/models.py",
            """    async def name(request: Request) -> Response:
        return json_response(Name(service.names[0]))

    return [
        Route("/name", name, methods=["GET"]),
""",
            "    return [\n",
        ),
        Edit(
            "orca_jax/serve/models.py",
            "schema.answers import ModelCard, ModelList, Name, NamedModel, Version",
            "schema.answers import ModelCard, ModelList, NamedModel, Version",
        ),
        Edit(
            "orca_jax/serve/openai/schema/answers.py",
            '''class Name(msgspec.Struct, frozen=True):
    """The answer of `GET /name`."""

    name: str


class Version(''',
            "class Version(",
        ),
        Edit(
            "orca_jax/serve/openapi.py",
            "    ModelList,\n    Name,\n    ServerLoad,",
            "    ModelList,\n    ServerLoad,",
        ),
        Edit(
            "orca_jax/serve/openapi.py",
            "        ModelList,\n        Name,\n        Version,",
            "        ModelList,\n        Version,",
        ),
        after(
            "orca_jax/serve/openapi.py",
            """        "/version": get("The server's version", "Version"),""",
            """        "/name": get("The served model's name", "Name"),\n""",
        ),
        Edit(
            "tests/serve/test_name.py",
            '''"""The route of the name."""

import pytest

from tests.serve.running import MODEL, Server


@pytest.mark.conforms("GET /name")
def test_name(server: Server) -> None:
    assert server.http.get("/name").json() == {"name": MODEL}
''',
        ),
    ),
    (
        "tests/serve/test_name.py",
        "tests/serve/test_openapi.py",
        "tests/serve/test_conformance.py",
        "tests/docs/test_generated.py",
    ),
)

METRIC = Walk(
    "a metric",
    (
        after(
            "orca_jax/engine.py",
            "    late_adapters: int = 0  # given up, since reading took too long",
            "    arrivals: int = 0  # requests ever added\n",
        ),
        after(
            "orca_jax/engine.py",
            "            preemptions=self.pool.num_preemptions,",
            "            arrivals=self.pool.num_arrived,\n",
        ),
        after(
            "orca_jax/serve/telemetry/metrics.py",
            '        "iterations": Counter("iterations_total", "Iterations of the engine."),',
            '        "arrivals": Counter("arrivals_total", "Requests added to the engine."),\n',
        ),
        Edit(
            "tests/telemetry/test_observer.py",
            '"preemptions": 4, "iterations": 10, "arrivals": 7}',
            '"preemptions": 4, "iterations": 10}',
        ),
        after(
            "tests/telemetry/test_observer.py",
            '            "iterations_total": 10,',
            '            "arrivals_total": 7,\n',
        ),
        after(
            "docs/operations.md",
            "| `orca_jax_iterations_total` | counter | | Iterations of the engine. |",
            "| `orca_jax_arrivals_total` | | | |\n",
        ),
    ),
    (
        "tests/telemetry/test_observer.py",
        "tests/serve/test_deploy.py::test_metrics_table",
        "tests/link/test_wire.py",
    ),
)
