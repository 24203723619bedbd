"""Options of the compiler, and compilers without them."""

import logging

import jax
import jax.numpy as jnp
import pytest

from orca_jax.exec.compile import compile_one, compiler_options


def test_one_generation_has_options() -> None:
    assert compiler_options("TPU7x")
    assert not any(map(compiler_options, ("TPU v6 lite", "TPU v5", "NVIDIA H200", "cpu")))


def test_an_option_that_xla_does_not_know_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    lowered = jax.jit(lambda x: x + 1).lower(jnp.ones(3))
    with caplog.at_level(logging.WARNING):
        program = compile_one(lowered, {"xla_no_such_option": False})
    assert program(jnp.ones(3)).tolist() == [2, 2, 2]
    assert "xla_no_such_option" in caplog.text


def test_a_value_that_an_option_does_not_take_is_an_error() -> None:
    lowered = jax.jit(lambda x: x + 1).lower(jnp.ones(3))
    with pytest.raises(jax.errors.JaxRuntimeError):
        compile_one(lowered, {"xla_dump_max_hlo_modules": True})
