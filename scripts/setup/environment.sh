# Sourced by scripts/quickstart and scripts/test: a virtual environment with llmctl in it.
#
#   make_environment EXTRA    installs ".[EXTRA]" in place, unless it is, and sets $python
#
# The active virtual environment is used when there is one, .venv otherwise.

torch_version=2.13.0 # the version the tests run on; any from 2.8 on works
torch_cpu_index=https://download.pytorch.org/whl/cpu

say() { printf '%s\n' "$*" >&2; }

fail() {
    say "error[$1]: $2"
    say "fix: $3"
    exit 1
}

# The first interpreter that runs (a shim on the path may not) and has a version that fits.
find_python() {
    for candidate in python3.12 python3.11 python3.13 python3; do
        if "$candidate" -c \
            'import sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
            >/dev/null 2>&1; then
            command -v "$candidate"
            return
        fi
    done
    return 1
}

# A virtual environment with pip, also where Debian's python3-venv is missing.
make_venv() {
    base=$(find_python) || fail PythonMissing \
        "no Python from 3.11 to 3.13 was found" "sudo apt-get install python3 python3-venv"
    say "making $1 with $base"
    "$base" -m venv "$1" >/dev/null 2>&1 && return
    rm -rf "$1"
    say "Debian's python3-venv is missing; fetching pip from PyPI"
    "$base" -m venv --without-pip "$1" >/dev/null &&
        "$base" scripts/setup/bootstrap_pip.py "$1/bin/python" && return
    rm -rf "$1"
    fail VenvMissing "$base cannot make a virtual environment with pip in it" \
        "sudo apt-get install python3-venv"
}

# pip without its remarks, unless it fails.
quiet_pip() {
    log=$(mktemp)
    if "$python" -m pip "$@" >"$log" 2>&1; then
        rm -f "$log"
    else
        cat "$log" >&2
        rm -f "$log"
        fail InstallFailed "pip $* failed, see above" "repair what pip names and run this again"
    fi
}

# PyTorch without its CUDA libraries (gigabytes that the cpu backend never loads) where possible.
install_torch() {
    "$python" -c 'import torch' >/dev/null 2>&1 && return
    say "installing PyTorch $torch_version for CPU (about 200 MB)"
    "$python" -m pip install "$compile" --quiet --retries 1 --timeout 20 \
        --index-url "$torch_cpu_index" "torch==$torch_version" >/dev/null 2>&1 && return
    say "$torch_cpu_index did not answer; taking the default index (its build may be gigabytes)"
    quiet_pip install "$compile" "torch==$torch_version"
}

# What an installation was made from and for; another one is needed when it changes.
fingerprint() {
    {
        printf '%s\n' "$PWD" "$1"
        "$python" --version
        for packages in "$environment"/lib/python3.*/site-packages; do
            ls "$packages"
            cat "$packages"/__editable__*llmctl*
        done
        cat pyproject.toml plugins/backends/cpu/*.py plugins/backends/cpu/*.so
        find plugins -name '*.cpp' -o -name '*.h' | LC_ALL=C sort | xargs cat
    } 2>&1 | sha256sum
}

make_environment() {
    environment=${VIRTUAL_ENV:-$PWD/.venv}
    python=$environment/bin/python
    stamp=$environment/llmctl-$1.installed
    [ -f "$stamp" ] && [ "$(fingerprint "$1")" = "$(cat "$stamp")" ] && return
    "$python" -m pip --version >/dev/null 2>&1 || {
        # Only what this script made may be made again.
        [ -z "${VIRTUAL_ENV:-}" ] || fail PipMissing "the active environment $environment has no pip" \
            "deactivate it, or: $python -m ensurepip"
        rm -rf "$environment"
        make_venv "$environment"
    }
    # Modules are compiled when they are imported, most never; or now, if that could not be kept.
    compile=--no-compile
    [ -z "${PYTHONDONTWRITEBYTECODE:-}" ] || compile=--compile
    say "compiling the kernels"
    "$python" plugins/backends/cpu/compile.py >/dev/null 2>&1 & # beside PyTorch's download
    compiling=$!
    install_torch
    say "installing llmctl"
    if wait "$compiling"; then
        export LLMCTL_KERNELS_COMPILED=1
    fi # else pip compiles them again, and says what is wrong
    quiet_pip install "$compile" --editable ".[$1]"
    unset LLMCTL_KERNELS_COMPILED
    fingerprint "$1" >"$stamp"
}
