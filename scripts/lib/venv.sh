# Sourced by scripts/{serve,test,check}. `ensure_venv [extra]` leaves $PYTHON: the interpreter of <root>/.venv with the
# project installed editable at the versions of constraints.txt. It needs nothing but bash and some Python >= 3.12,
# may be interrupted at any point, and may run several times at once.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
VENV=$ROOT/.venv
PYTHON=$VENV/bin/python
INSTALLING=$VENV/.orca-installing # there while pip works; found later, it means that pip was killed half-way

say() { printf '%s\n' "$*" >&2; }

die() {
    say "error: $*"
    exit 1
}

new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1; }

# Prints the interpreters worth asking, best first: the pins of constraints.txt are tested most on 3.12.
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

# Prints the first interpreter that is new enough and can make environments, or explains what to do and fails.
find_python() {
    local candidate without_venv=
    while IFS= read -r candidate; do
        new_enough "$candidate" || continue
        if "$candidate" -c 'import ensurepip, venv' >/dev/null 2>&1; then
            printf '%s\n' "$candidate"
            return
        fi
        without_venv=$candidate # Debian and Ubuntu ship the two modules apart
    done < <(candidate_pythons)
    if [ -n "$without_venv" ]; then
        say "error: $without_venv is new enough, but cannot make virtual environments."
        say "On Debian and Ubuntu: sudo apt-get install python3-venv. Then run this script again."
    else
        say "error: orca-jax needs Python 3.12 or newer; there is none on PATH, under pyenv or under uv."
        say "Get one, then run this script again. Any of these will do:"
        say "    uv python install 3.12"
        say "    pyenv install 3.12"
        say "    sudo apt-get install python3.12 python3.12-venv"
        say "    brew install python@3.12"
        say "Is it somewhere else? Make the environment with it: path/to/python3 -m venv '$VENV'"
    fi
    return 1
}

# What an installation depends on. The whole text is kept as the stamp, so no hash can collide.
fingerprint() {
    printf 'root %s\nextra %s\n' "$ROOT" "$1"
    "$PYTHON" -c 'import sys; print(sys.version)'
    cat "$ROOT/pyproject.toml" "$ROOT/constraints.txt"
}

stamp() { printf '%s\n' "$VENV/.orca-installed${1:+-$1}"; }

# True where the newest finished installation of this extra is what the tree asks for.
is_current() {
    [ -x "$PYTHON" ] && [ ! -e "$INSTALLING" ] && [ -f "$(stamp "$1")" ] &&
        [ "$(fingerprint "$1" 2>/dev/null)" = "$(cat "$(stamp "$1")")" ]
}

# Locks file descriptor 9 until it is closed here and in every child: an orphaned pip still keeps others out.
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
        new_enough "$PYTHON" || die "$VENV holds a Python older than 3.12. Move it away, then run this script again."
        # Made by uv, or by a venv that was interrupted before it had pip.
        "$PYTHON" -m pip --version >/dev/null 2>&1 || "$PYTHON" -m ensurepip --default-pip >/dev/null
        return
    fi
    say "Making $VENV with $base"
    "$base" -m venv --clear "$VENV" || die "could not make $VENV"
}

install() {
    local extra=$1 log=$VENV/install.log
    rm -f "$VENV"/.orca-installed*
    touch "$INSTALLING"
    say "Installing orca-jax${extra:+[$extra]}; the first time this takes a few minutes."
    if ! "$PYTHON" -m pip install --quiet --disable-pip-version-check --no-input \
        --constraint "$ROOT/constraints.txt" --editable "$ROOT${extra:+[$extra]}" >"$log" 2>&1; then
        rm -f "$INSTALLING" # pip ended by itself, so it left nothing half-written
        cat "$log" >&2
        die "pip could not install orca-jax; its messages are above and in $log"
    fi
    fingerprint "$extra" >"$(stamp "$extra")"
    # Every extra holds the run-time dependencies too.
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
