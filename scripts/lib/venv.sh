# Sourced by scripts/{serve,test,check}. `ensure_venv [extra]` sets $PYTHON to the interpreter of <root>/.venv, with the
# files of requirements/ whose hashes are right, and the project installed editable. It needs only bash and a
# Python >= 3.12. It may be interrupted at any point, and several may run at the same time.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
VENV=$ROOT/.venv
PYTHON=$VENV/bin/python
INSTALLING=$VENV/.orca-installing # exists while pip works; if found later, pip was killed half-way

say() { printf '%s\n' "$*" >&2; }

die() {
    say "error: $*"
    exit 1
}

new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1; }

# Prints the candidate interpreters, best first: the pins are tested most on 3.12.
candidate_pythons() {
    local name version
    local pyenv=${PYENV_ROOT:-${HOME:-}/.pyenv}/versions
    local uv=${UV_PYTHON_INSTALL_DIR:-${XDG_DATA_HOME:-${HOME:-}/.local/share}/uv/python}
    for version in 3.12 3.13 3.14; do
        command -v "python$version" || true
        for name in "$pyenv/$version".*/bin/python3 "$uv/cpython-$version".*/bin/python3; do
            if [ -x "$name" ]; then printf '%s\n' "$name"; fi
        done
    done
    command -v python3 || true
    command -v python || true
}

# Prints the first interpreter that is new enough and can create environments. Otherwise prints instructions and fails.
find_python() {
    local candidate without_venv=
    while IFS= read -r candidate; do
        new_enough "$candidate" || continue
        if "$candidate" -c 'import ensurepip, venv' >/dev/null 2>&1; then
            printf '%s\n' "$candidate"
            return
        fi
        without_venv=$candidate # Debian and Ubuntu ship the two modules in a separate package
    done < <(candidate_pythons)
    if [ -n "$without_venv" ]; then
        say "error: $without_venv is new enough, but it cannot create virtual environments."
        say "On Debian and Ubuntu: sudo apt-get install python3-venv. Then run this script again."
    else
        say "error: orca-jax needs Python 3.12 or newer; none was found on PATH, under pyenv or under uv."
        say "Install one, then run this script again. Any of these commands will do:"
        say "    uv python install 3.12"
        say "    pyenv install 3.12"
        say "    sudo apt-get install python3.12 python3.12-venv"
        say "    brew install python@3.12"
        say "If Python is installed elsewhere, create the environment with it: path/to/python3 -m venv '$VENV'"
    fi
    return 1
}

# Prints everything that an installation depends on. The stamp is the whole text, so that no hash can collide.
fingerprint() {
    printf 'root %s\nextra %s\n' "$ROOT" "$1"
    "$PYTHON" -c 'import sys; print(sys.version)'
    cat "$ROOT/pyproject.toml" "$ROOT/requirements/run.txt" "$ROOT/requirements/${1:-run}.txt"
}

stamp() { printf '%s\n' "$VENV/.orca-installed${1:+-$1}"; }

# True if the last finished installation of this extra matches the tree.
is_current() {
    [ -x "$PYTHON" ] && [ ! -e "$INSTALLING" ] && [ -f "$(stamp "$1")" ] &&
        [ "$(fingerprint "$1" 2>/dev/null)" = "$(cat "$(stamp "$1")")" ]
}

# Locks file descriptor 9 until it is closed here and in every child: an orphaned pip still holds the lock.
# Python does the locking, because macOS has no flock command.
lock() {
    exec 9>"$ROOT/.venv.lock"
    "$1" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)' 2>/dev/null && return
    say "Another script is setting up $VENV; waiting for it."
    "$1" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX)'
}

unlock() { exec 9>&-; }

make_venv() {
    local base=$1
    if [ -x "$PYTHON" ] && "$PYTHON" -c '' 2>/dev/null && [ ! -e "$INSTALLING" ]; then
        new_enough "$PYTHON" || die "$VENV has a Python older than 3.12. Move it away, then run this script again."
        # uv creates environments without pip, and so does a venv interrupted before its last step.
        "$PYTHON" -m pip --version >/dev/null 2>&1 || "$PYTHON" -m ensurepip --default-pip >/dev/null
        return
    fi
    say "Creating $VENV with $base"
    "$base" -m venv --clear "$VENV" || die "could not create $VENV"
}

# Wheels with known hashes only. The project itself has no hash, so it comes alone, and is built by what is installed.
install_files() {
    local pip=("$PYTHON" -m pip install --quiet --disable-pip-version-check --no-input)
    "${pip[@]}" --require-hashes --only-binary :all: --requirement "$ROOT/requirements/${1:-run}.txt" &&
        "${pip[@]}" --no-deps --no-build-isolation --editable "$ROOT"
}

install() {
    local extra=$1 log=$VENV/install.log
    rm -f "$VENV"/.orca-installed*
    touch "$INSTALLING"
    say "Installing orca-jax${extra:+[$extra]}; the first time this takes a few minutes."
    if ! install_files "$extra" >"$log" 2>&1; then
        rm -f "$INSTALLING" # pip ended by itself and left nothing half-written
        cat "$log" >&2
        die "pip could not install orca-jax; see its messages above or in $log"
    fi
    fingerprint "$extra" >"$(stamp "$extra")"
    # Every extra includes the run-time dependencies.
    if [ -n "$extra" ]; then fingerprint "" >"$(stamp "")"; fi
    rm -f "$INSTALLING"
}

ensure_venv() {
    local extra=${1:-} base=$PYTHON
    is_current "$extra" && return
    new_enough "$PYTHON" && [ ! -e "$INSTALLING" ] || base=$(find_python) || exit 1
    lock "$base"
    if ! is_current "$extra"; then
        make_venv "$base"
        install "$extra"
    fi
    unlock
}
