#!/bin/sh
# Usage: scripts/install.sh EXTRA...      e.g. lab  or  test lab
#
# Makes .venv and installs labkit into it, with the named extras; done in a second when nothing has changed since.
# Plain POSIX sh: it has to run where nothing is installed yet, on Debian's dash as on macOS's old bash.
#
#   PYTHON=/path/to/python3.12   the Python to use, instead of the one that is found
#   PINNED=1 or 0                install constraints.txt's versions, or not, instead of the rule below
#   TORCH_INDEX=ADDRESS          take torch from this package index (for a CPU build, or for another CUDA)
set -eu

extras=$(echo "$*" | tr " " ",")
root=$(cd "$(dirname "$0")/.." && pwd -P)
cd "$root"
venv=$root/.venv
stamp=$venv/.labkit-installed
log=$venv/install.log

say() { printf 'labkit: %s\n' "$*"; }
fail() {
    printf 'labkit: error: %s\n' "$1" >&2
    shift
    [ $# = 0 ] || printf '%s\n' "$@" | sed 's/^/  /' >&2
    exit 1
}
have() { command -v "$1" >/dev/null 2>&1; }

# A user's own settings must not reach into .venv, nor .venv's packages out of it.
unset PYTHONPATH PYTHONHOME PIP_TARGET PIP_PREFIX 2>/dev/null || true
PYTHONNOUSERSITE=1 PIP_USER=0 PIP_DISABLE_PIP_VERSION_CHECK=1
export PYTHONNOUSERSITE PIP_USER PIP_DISABLE_PIP_VERSION_CHECK

# ---- find a Python ---------------------------------------------------------------------------------------------------

# Prints a version such as 3.12, or nothing for a name that is no working Python (a pyenv shim, a Store alias).
version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true; }
recent() { case $1 in 3.1[1-9] | 3.[2-9][0-9]) true ;; *) false ;; esac }
tested() { case $1 in 3.11 | 3.12 | 3.13) true ;; *) false ;; esac }

how_to_get_python() {
    if [ "$(uname -s)" = Darwin ]; then
        echo "Install it with  brew install python@3.13  or with the installer from python.org."
    elif have apt-get; then
        echo "Install it with  sudo apt-get install python3 python3-venv"
        echo "If that is older than 3.11 (Ubuntu 22.04):  sudo apt-get install python3.11 python3.11-venv"
    elif have dnf; then
        echo "Install it with  sudo dnf install python3.12"
    else
        echo "Install Python 3.11 or newer with your system's package manager, or from python.org."
    fi
    echo "A Python that lies somewhere else can be named:  make lab PYTHON=/path/to/python3.12"
}

find_python() {
    python=
    seen=
    if [ -n "${PYTHON:-}" ]; then
        candidates=$PYTHON
    else
        candidates="python3 python3.13 python3.12 python3.11 python python3.14"
    fi
    for accept in tested recent; do # a version that CI does not run is better than none
        for name in $candidates; do
            have "$name" || continue
            version=$(version_of "$name")
            [ -n "$version" ] || continue
            case " $seen" in *" $name ("*) ;; *) seen="$seen $name ($version)" ;; esac
            if "$accept" "$version"; then
                python=$name
                return
            fi
        done
    done
    fail "labkit needs Python 3.11 or newer; found here:${seen:- none}." "$(how_to_get_python)"
}

# ---- make .venv ------------------------------------------------------------------------------------------------------

make_venv() {
    find_python
    say "making .venv with $python (Python $version)"
    if "$python" -c 'import ensurepip, venv' >/dev/null 2>&1; then
        "$python" -m venv "$venv"
    elif "$python" -m venv --without-pip "$venv" >/dev/null 2>&1 &&
        "$python" -m pip --python "$venv/bin/python" install --quiet pip >/dev/null 2>&1; then
        say "this Python cannot put pip into a .venv (no ensurepip): took the system's pip for it"
    else
        rm -rf "$venv"
        if have apt-get; then
            fail "$python cannot make a virtual environment: Debian and Ubuntu ship that in a package of its own." \
                "Install it with  sudo apt-get install python$version-venv   then run the same command again."
        fi
        fail "$python cannot make a virtual environment (its venv or ensurepip module is missing)." \
            "$(how_to_get_python)"
    fi
    printf '%s\n' "$root" >"$venv/.labkit-root"
}

if [ -e "$venv" ] || [ -h "$venv" ]; then
    [ -f "$venv/pyvenv.cfg" ] || fail ".venv exists and is no virtual environment; move it away and try again."
    version=$(version_of "$venv/bin/python")
    if ! recent "$version"; then
        say ".venv has ${version:+Python }${version:-no working Python}: making it anew"
        rm -rf "$venv"
    elif [ -f "$venv/.labkit-root" ] && [ "$(cat "$venv/.labkit-root")" != "$root" ]; then
        say "this folder was moved, and the commands in .venv point to the old place: making it anew"
        rm -rf "$venv"
    fi
fi
[ -e "$venv" ] || make_venv
py=$venv/bin/python

# ---- choose versions -------------------------------------------------------------------------------------------------

# constraints.txt holds what CI ran, on Linux without a GPU. On a GPU the right torch is the one made for its driver, and
# on macOS another one again, so there pip chooses within pyproject.toml's ranges.
system=$(uname -s)
gpu=no
if have nvidia-smi || [ -e /dev/nvidiactl ] || [ -e /usr/lib/wsl/lib/nvidia-smi ]; then gpu=yes; fi
case ${PINNED:-auto} in
    1) pinned=1 why="PINNED=1" ;;
    0) pinned=0 why="PINNED=0" ;;
    *)
        if [ "$system" != Linux ]; then
            pinned=0 why="$system"
        elif [ "$gpu" = yes ]; then
            pinned=0 why="an NVIDIA GPU is here"
        elif ! tested "$version"; then
            pinned=0 why="Python $version"
        else
            pinned=1 why="Linux without an NVIDIA GPU, as in CI"
        fi
        ;;
esac

key="$(cat pyproject.toml constraints.txt scripts/install.sh | cksum) pinned=$pinned torch=${TORCH_INDEX:-} $version"
done_extras=
if [ -f "$stamp" ] && [ "$(sed -n 1p "$stamp")" = "$key" ]; then done_extras=$(sed -n 2p "$stamp"); fi
missing=
for extra in "$@"; do
    case ",$done_extras," in *",$extra,"*) ;; *) missing="$missing $extra" ;; esac
done
if [ -z "$missing" ]; then
    say "everything is installed in .venv (Python $version)"
    exit 0
fi

if [ "$pinned" = 1 ]; then
    say "installing the versions in constraints.txt ($why)"
    set -- -c constraints.txt
else
    say "installing the newest versions that pyproject.toml allows ($why)"
    set --
fi

if ! "$py" -c 'import torch' >/dev/null 2>&1; then
    if [ "$system" = Darwin ] && [ "$(uname -m)" = x86_64 ]; then
        say "note: this is an Intel Mac or an Intel Python, and PyTorch 2.9 and newer exist for Apple silicon only"
    elif [ "$system" = Linux ] && [ "$(uname -m)" = x86_64 ] && [ "$gpu" = no ] && [ -z "${TORCH_INDEX:-}" ]; then
        say "note: the usual PyTorch for Linux brings CUDA along, several GB that this machine has no use for."
        say "      To take the CPU build: stop this, look up its index address on PyTorch's \"Start locally\" page"
        say "      (choose Linux, Pip, CPU), and run the same command with TORCH_INDEX=that-address"
    fi
fi

# ---- install ---------------------------------------------------------------------------------------------------------

# pip's output goes to a log; what is worth watching (big downloads, steps, errors) is shown as it comes.
run_pip() {
    {
        status=0
        "$py" -m pip install --progress-bar off "$@" || status=$?
        printf '%s\n' "$status" >"$venv/.pip-status"
    } 2>&1 </dev/null | tee -a "$log" | awk '
        /(Downloading|Using cached|Processing) .*\([0-9.]+ [MG]B\)/ { print "  " $1 " " $2 " " $3 " " $4; fflush(); next }
        /^(Installing|Obtaining|Successfully)/ { print "  " substr($0, 1, 110); fflush(); next }
        /^ERROR|error:/ { print "  " $0; fflush() }'
    status=$(cat "$venv/.pip-status")
    rm -f "$venv/.pip-status"
    [ "$status" = 0 ] || fail "pip could not install labkit; all it said is in .venv/install.log, ending:" "$(tail -n 15 "$log")"
}

rm -f "$stamp"
: >"$log"
start=$(date +%s)
if [ -n "${TORCH_INDEX:-}" ]; then
    say "taking torch from $TORCH_INDEX"
    torch=$(sed -n 's/^ *"\(torch[<>=!~].*\)",.*$/\1/p' pyproject.toml)
    run_pip "$@" --index-url "$TORCH_INDEX" "$torch"
fi
say "installing labkit[$extras] and what it needs into .venv: minutes the first time"
run_pip "$@" --editable ".[$extras]"

if "$py" -c 'import ipykernel, jupyterlab' >/dev/null 2>&1; then
    # A kernel named python3 inside .venv, with .venv's own Python written out, so that the lessons run here even where
    # the user has another kernel of that name in their home folder.
    "$py" -m ipykernel install --sys-prefix --name python3 --display-name "Python 3 (ipykernel)" >>"$log" 2>&1 ||
        fail "could not register the notebooks' kernel; see .venv/install.log"
    # No pop-up that asks to fetch Jupyter's news.
    "$venv/bin/jupyter" labextension disable --level=sys_prefix "@jupyterlab/apputils-extension:announcements" \
        >>"$log" 2>&1 || true
fi

for extra in $(printf '%s' "$done_extras" | tr ',' ' '); do
    case ",$extras," in *",$extra,"*) ;; *) extras="$extras,$extra" ;; esac
done
printf '%s\n%s\n' "$key" "$extras" >"$stamp"
say "installed in $(($(date +%s) - start)) s"
