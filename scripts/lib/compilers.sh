# Sourced by scripts/test after venv.sh. `ensure_compilers` installs XLA's compilers for TPUs and GPUs into
# <root>/.compilers: with them, tests compile for devices that this machine lacks. They stay out of .venv, because there
# JAX would search for such devices at every start. If they cannot be installed, the tests that need them are skipped.

COMPILERS=$ROOT/.compilers
COMPILER_PINS=$ROOT/tests/aot/requirements.txt

wanted_compilers() {
    "$PYTHON" -c 'import sys; print("# for Python %d.%d" % sys.version_info[:2])'
    cat "$COMPILER_PINS"
}

have_compilers() {
    [ -f "$COMPILERS/installed.txt" ] && [ "$(wanted_compilers)" = "$(cat "$COMPILERS/installed.txt")" ]
}

# An interrupted installation has no installed.txt; the next call starts it again.
install_compilers() {
    say "Installing compilers for TPUs and GPUs, used by tests only: about 350 MiB, once."
    rm -rf "$COMPILERS"
    mkdir -p "$COMPILERS"
    if "$PYTHON" -m pip install --quiet --disable-pip-version-check --no-input --no-deps --no-compile \
        --require-hashes --only-binary :all: --requirement "$COMPILER_PINS" --target "$COMPILERS" \
        >"$COMPILERS/install.log" 2>&1; then
        wanted_compilers >"$COMPILERS/installed.txt"
    else
        say "warning: pip could not install the compilers (see $COMPILERS/install.log); tests that need them are skipped."
    fi
}

ensure_compilers() {
    [[ $OSTYPE == linux* && $HOSTTYPE == x86_64 ]] || return 0 # no other platform has wheels
    have_compilers && return
    lock "$PYTHON"
    have_compilers || install_compilers
    unlock
}
