# Sourced by scripts/test after venv.sh. `ensure_compilers` puts XLA's compilers for TPUs and GPUs into <root>/.compilers,
# so that tests can compile for devices that are not here. They stay out of .venv, where JAX would look for such devices
# at every start. Where they cannot be had, the tests that need them are skipped.

COMPILERS=$ROOT/.compilers
COMPILER_PINS=$ROOT/tests/aot/requirements.txt

wanted_compilers() {
    "$PYTHON" -c 'import sys; print("# for Python %d.%d" % sys.version_info[:2])'
    cat "$COMPILER_PINS"
}

have_compilers() {
    [ -f "$COMPILERS/installed.txt" ] && [ "$(wanted_compilers)" = "$(cat "$COMPILERS/installed.txt")" ]
}

# What was interrupted has no installed.txt, and is begun anew.
install_compilers() {
    say "Getting compilers for TPUs and GPUs, for tests alone: some 350 MiB, once."
    rm -rf "$COMPILERS"
    mkdir -p "$COMPILERS"
    if "$PYTHON" -m pip install --quiet --disable-pip-version-check --no-input --no-deps --no-compile \
        --requirement "$COMPILER_PINS" --target "$COMPILERS" >"$COMPILERS/install.log" 2>&1; then
        wanted_compilers >"$COMPILERS/installed.txt"
    else
        say "warning: pip could not get them (its messages are in $COMPILERS/install.log): tests that need them are skipped."
    fi
}

ensure_compilers() {
    [[ $OSTYPE == linux* && $HOSTTYPE == x86_64 ]] || return 0 # there are wheels for nothing else
    have_compilers && return
    lock "$PYTHON"
    have_compilers || install_compilers
    unlock
}
