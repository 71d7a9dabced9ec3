# Sourced by first-run, run-tests and .ci/run: finds a Python and makes a virtual environment.
#
# PYTHON  the interpreter; the newest usable one of those on PATH unless set
# VENV    the folder of the virtual environment; .venv unless set
#
# What Python compiles, and pytest rewrites, is kept in .pycache, whatever the environment says:
# each of the programs that tests start would compile everything again. Nothing is compiled that is
# not used.

unset PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX="$PWD/.pycache"

usable() {
    "$1" -c 'import sys; raise SystemExit(sys.version_info < (3, 10))' >/dev/null 2>&1
}

# Prints the interpreter to use.
find_python() {
    if [ -n "${PYTHON:-}" ]; then
        if usable "$PYTHON"; then
            echo "$PYTHON"
            return
        fi
        echo "PYTHON=$PYTHON is not a Python 3.10 or later" >&2
        return 1
    fi
    for candidate in python3 python3.13 python3.12 python3.11 python3.10 python \
        "$HOME"/.pyenv/versions/3.1[0-3].*/bin/python; do
        if usable "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    echo "Python 3.10 or later is needed; set PYTHON to where it is" >&2
    return 1
}

# make_venv EXTRA: sets $python to a Python that has this checkout installed with that extra.
make_venv() {
    venv=${VENV:-.venv}
    python=$venv/bin/python
    if [ -n "${PYTHON:-}" ] && [ -x "$python" ] && ! same_version; then
        rm -f "$venv"/.celery-toc-*
        "$(find_python)" -m venv --clear "$venv" || return 1
    fi
    if ! usable "$python"; then
        base=$(find_python) || return 1
        echo "Making a virtual environment in $venv ($("$base" --version))"
        "$base" -m venv --clear "$venv" || {
            echo "$base cannot make virtual environments; set PYTHON to one that can" >&2
            return 1
        }
    fi
    # Nothing is asked of the network again until the requirements change.
    if ! installed "$1" && ! { [ "$1" = test-unit ] && installed test; }; then
        echo "Installing celery-toc[$1]"
        "$python" -m pip install --quiet --disable-pip-version-check --no-compile \
            --editable ".[$1]" || return 1
        echo "$PWD" >"$venv/.celery-toc-$1"
    fi
}

# Whether the environment has that extra, as setup.cfg has it now.
installed() {
    stamp=$venv/.celery-toc-$1
    [ -e "$stamp" ] && [ ! setup.cfg -nt "$stamp" ] && [ "$(cat "$stamp")" = "$PWD" ]
}

# Whether the environment was made from $PYTHON's version.
same_version() {
    show='import sys; print(sys.version)'
    [ "$("$python" -c "$show" 2>/dev/null)" = "$("$PYTHON" -c "$show" 2>/dev/null)" ]
}
