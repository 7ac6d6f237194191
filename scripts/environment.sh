# Sourced by the other scripts: make_environment FOLDER EXTRAS [REQUIREMENT ..] makes a virtual
# environment with this project in it, or reuses the one that is there. Run from the repository's root.

say() { printf '[%s] %s\n' "$(date +%H:%M:%S)" "$*" >&2; }

find_python() {
    local candidate
    for candidate in "${PYTHON:-python3}" python3.14 python3.13 python3.12 python3.11; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    say "error: no Python 3.11 or newer found; install one or set PYTHON=/path/to/it"
    return 1
}

make_environment() {
    local folder=$1 extras=$2 python wanted
    shift 2
    python=$(find_python) || return 1
    # A finished installation is stamped with what it was made from, an unfinished one is taken up again.
    wanted="$(pwd) [$extras] $* $(cat pyproject.toml constraints.txt | cksum)"
    if [ -f "$folder/.installed" ] && [ "$(cat "$folder/.installed")" = "$wanted" ]; then
        say "using the environment $folder"
        return
    fi
    if ! [ -x "$folder/bin/python" ]; then
        say "making the environment $folder with $("$python" --version)"
        "$python" -m venv "$folder" || {
            rm -rf "$folder"
            say "error: $python cannot make a virtual environment (on Debian and Ubuntu: apt install python3-venv)"
            return 1
        }
    fi
    local pip=("$folder/bin/python" -m pip --disable-pip-version-check --quiet)
    say "installing torch (the first time this takes a minute or more)"
    "${pip[@]}" install -c constraints.txt torch || return 1
    say "installing medusa-heads[$extras] $*"
    "${pip[@]}" install -c constraints.txt -e ".[$extras]" "$@" || return 1
    echo "$wanted" >"$folder/.installed"
}
