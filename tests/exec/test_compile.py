"""Options of the compiler, and compilers without them."""

import logging

import jax
import jax.numpy as jnp
import pytest

from orca_jax.exec.compile import compile_one, compiler_options


def test_one_generation_of_tpus_and_all_gpus_have_options() -> None:
    assert compiler_options("tpu", "TPU7x")
    assert compiler_options("gpu", "NVIDIA H200") == compiler_options("gpu", "NVIDIA A100-SXM4-40GB") != {}
    others = ("tpu", "TPU v6 lite"), ("tpu", "TPU v5"), ("cpu", "cpu")
    assert not any(compiler_options(*kind) for kind in others)


def test_an_option_unknown_to_xla_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    lowered = jax.jit(lambda x: x + 1).lower(jnp.ones(3))
    with caplog.at_level(logging.WARNING):
        program = compile_one(lowered, {"xla_no_such_option": False})
    assert program(jnp.ones(3)).tolist() == [2, 2, 2]
    assert "xla_no_such_option" in caplog.text


def test_a_wrong_value_of_an_option_is_an_error() -> None:
    lowered = jax.jit(lambda x: x + 1).lower(jnp.ones(3))
    with pytest.raises(jax.errors.JaxRuntimeError):
        compile_one(lowered, {"xla_dump_max_hlo_modules": True})
