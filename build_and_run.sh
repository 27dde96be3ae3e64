#!/usr/bin/env bash
# From a clone to a tested library with one command. Needs Python 3.10+ and a C++ compiler; ./build_and_run.sh --help says the rest.
if [ -z "${BASH_VERSION:-}" ]; then # sh reads as far as here: what follows is bash
    command -v bash >/dev/null 2>&1 && exec bash -- "$0" "$@"
    echo "build_and_run.sh: this is a bash script, and there is no bash on PATH" >&2
    exit 1
fi
set +o posix # bash under the name sh
set -euo pipefail

usage() {
    cat <<'EOF'
usage: ./build_and_run.sh [VERB] [OPTION ...] [-- ARGUMENT ...]

verbs     run      build, native checks, benchmark against standard attention, summary (the default)
          build    the library and the native test program alone
          test     build, then the quick tests; with --all every test (arguments after -- go to pytest)
          bench    build, then the benchmark alone          (arguments after -- go to test_flash_attn --bench)
          clean    remove the build folder and the environment, if this script has made them

options   --all-kernels  compile every GPU kernel where there is no GPU, too, for one target, Hopper (5 times the work)
          --arch LIST    the same for these GPU targets, e.g. 90 or 80,86,90, or all
          --with-cuda    compile the general GPU kernels even where there is neither a GPU nor nvcc (which PyPI has)
          --cpu-only     leave the GPU kernels out
          --clean        throw the old build away first, if this script has made its folder
          --jobs N       compile N files at once; default: all cores
          -DNAME=VALUE   passed to CMake
          --help

GPU kernels: with a GPU all of them, for that GPU. Without a GPU the general ones for one target, which show that everything
compiles; a library for use on a GPU needs --all-kernels or --arch. A folder that has all kernels keeps them until --clean.

.venv/bin/python imports flash_attn_minimal from this checkout when the build is done, in any shell. What is missing (CMake,
Ninja, NumPy, for tests pytest, without nvcc NVIDIA's compiler) is installed into .venv/ from PyPI. What is installed already
is used as it is, so a machine without network works too when it has the tools.
environment: PYTHON (the Python to start from), FLASH_ATTN_VENV (default .venv), FLASH_ATTN_BUILD (default build), CXX, CUDACXX
A folder that is there already must be empty, or an environment, or a build of this checkout. Only folders with the file
.made_by_build_and_run are ever deleted.
EOF
}

say() { printf '%s\n' "$*"; }
die() { printf 'build_and_run.sh: %s\n' "$1" >&2; exit "${2:-1}"; }

# ---- arguments ----
every='' # test
script=${BASH_SOURCE[0]}
[[ ! -L $script ]] || script=$(readlink -f -- "$script") # a link to this file may be in any folder
root=$(CDPATH='' cd -- "$(dirname -- "$script")" && pwd)
build=${FLASH_ATTN_BUILD:-$root/build}
venv=${FLASH_ATTN_VENV:-$root/.venv}
[[ $build == /* ]] || build=$PWD/$build
[[ $venv == /* ]] || venv=$PWD/$venv
here=$PWD began=$SECONDS
verb='' cuda=auto arch='' all='' clean='' jobs='' defines=() rest=()
while (($#)); do
    case $1 in
        run | build | test | bench | clean) [[ -z $verb ]] || die "two verbs: '$verb' and '$1'" 2; verb=$1 ;;
        --cpu-only) cuda=off ;;
        --all-kernels) all=yes ;;
        --with-cuda) [[ $cuda == off ]] || cuda=on ;;
        --arch | --jobs) (($# > 1)) || die "$1 needs a value" 2; set -- "$1=$2" "${@:3}"; continue ;;
        --arch=?*) arch=${1#*=} ;;
        --jobs=?*) jobs=${1#*=}; [[ $jobs =~ ^[1-9][0-9]*$ ]] || die "--jobs: '$jobs' is not a positive number" 2 ;;
        --clean) clean=yes ;;
        --all) every=yes ;;
        -D?*=*) defines+=("$1") ;;
        -h | --help) usage; exit 0 ;;
        --) shift; rest=("$@"); break ;;
        *) die "unknown argument '$1' (--help lists them)" 2 ;;
    esac
    shift
done
[[ -z $every || $verb == test ]] || die "--all belongs to test" 2
verb=${verb:-run}
[[ -z $arch || $cuda != off ]] || die "--arch and --cpu-only exclude each other" 2
[[ -z $all || $cuda != off ]] || die "--all-kernels and --cpu-only exclude each other" 2

# ---- folders: what is not this script's stays ----
mark=.made_by_build_and_run # in each folder that this script has made, or found empty
holds() {                   # holds FOLDER PATH: the folder is PATH, or one of those above it
    local at
    at=$(CDPATH='' cd -P -- "$2" 2>/dev/null && pwd -P) || at=$2
    until [[ $1 -ef $at || $1 == "$at" ]]; do
        [[ $at == */* && $at != / ]] || return 1
        at=${at%/*} at=${at:-/}
    done
}
empty() { [[ ! -e $1 ]] || { [[ -d $1 ]] && [[ -z $(ls -A -- "$1") ]]; }; }
ours() {
    [[ -f $1/$mark ]] || { # the script wrote no mark at first, but made_by, and into folders of others, too
        [[ $1 -ef $root/build && -f $1/made_by ]] && [[ $(<"$1/made_by") == "$root "* ]]
    }
}
starts() { "$1/bin/python" -c '' 2>/dev/null; }
make() { # make FOLDER: with the mark, if it is new or empty
    ! empty "$1" || { mkdir -p -- "$1" && say "build_and_run.sh has made this folder, and deletes it with clean" >"$1/$mark"; }
}
clear_out() { # clear_out FOLDER: all that is in one of ours. The folder stays: a link may lead to it, a shell may stand in it.
    local folder
    folder=$(CDPATH='' cd -P -- "$1" && pwd -P)
    [[ $folder -ef $1 ]] && ours "$1" && ! holds "$folder" "$root" || die "$1 is not deleted: it is not a folder of this script's"
    find "$folder" -mindepth 1 -maxdepth 1 -exec rm -rf -- {} +
}
title() { LC_ALL=C printf '# %q' "$root/python"; } # the first line of the file that connect writes, in ASCII
while [[ $build == *?/ ]]; do build=${build%/}; done
while [[ $venv == *?/ ]]; do venv=${venv%/}; done
for setting in build venv; do # of a folder that is not there, the part that is there is resolved: no '..' is left behind it
    folder=${!setting} below=''
    [[ ! -d $folder && $folder/ == */../* ]] || continue
    until [[ -d $folder ]]; do below=/${folder##*/}$below folder=${folder%/*} folder=${folder:-/}; done
    folder=$(CDPATH='' cd -P -- "$folder" && pwd -P)
    printf -v "$setting" %s "${folder%/}$below"
done
for setting in "FLASH_ATTN_BUILD=$build" "FLASH_ATTN_VENV=$venv"; do
    folder=${setting#*=}
    ! holds "$folder" "$root" || die "$setting is the checkout $root, or holds it" 2
    [[ -d $folder || $folder/ != */../* ]] || die "$setting does not exist, so its '..' leads nowhere" 2
done
! holds "$venv" "$build" || die "FLASH_ATTN_VENV=$venv is FLASH_ATTN_BUILD=$build, or holds it" 2

if [[ $verb == clean || $clean ]]; then
    kept=''
    for folder in "$build" "$venv"; do
        [[ $verb == clean || $folder == "$build" ]] && ! empty "$folder" || continue
        why=''
        ! holds "$folder" "$venv" || empty "$venv" || ours "$venv" || why="it holds $venv, which this script has not made"
        ours "$folder" || why="this script has not made it (it has no $mark)"
        if [[ $why ]]; then
            say "kept $folder: $why" >&2
            kept=yes
        else
            clear_out "$folder"
            [[ $verb != clean || -L $folder ]] || rmdir -- "$folder"
            say "removed $folder"
        fi
    done
    for file in "$venv"/lib/python*/site-packages/flash_attn_minimal_checkout.pth; do # in somebody's environment: see connect
        [[ $verb == clean && -f $file && $(head -n 1 -- "$file") == "$(title)" ]] && rm -- "$file" && say "removed $file"
    done
    [[ ! $kept ]] || die "delete it yourself, if nothing in it is wanted"
    [[ $verb != clean ]] || exit 0
fi
home=$(sed -n 's/^CMAKE_HOME_DIRECTORY:INTERNAL=//p' "$build/CMakeCache.txt" 2>/dev/null) || home=''
empty "$build" || ours "$build" || [[ -d $build && ($build -ef $root/build || $home -ef $root) ]] ||
    die "FLASH_ATTN_BUILD=$build is neither empty nor a build of $root: name another folder" 2
empty "$venv" || ours "$venv" || starts "$venv" ||
    die "FLASH_ATTN_VENV=$venv is neither empty nor an environment whose Python starts: name another folder, or delete it" 2
jobs=${jobs:-$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)}
logs=$build/logs
make "$build"
mkdir -p -- "$logs"

# ---- running a step: its output goes to a log, the screen shows all of it (everything), the compiler's counter and pip's downloads (progress) ----
everything() { sed 's/^/    /'; }
progress() {
    local line end=$'\n' start='    '
    [[ -t 1 ]] && end='' start=$'\r\033[K    '
    while IFS= read -r line; do
        [[ ! $line =~ ^(\[[0-9]+/[0-9]+\]).*\.dir/(.*)\.o$ ]] || { finish "${BASH_REMATCH[2]}" && line="${BASH_REMATCH[1]} $left"; }
        [[ $line =~ ^\[\ *[0-9]+[/%] || $line =~ ^\ *(Downloading|Installing) ]] && printf '%s%s%s' "$start" "${line:0:110}" "$end"
    done
    [[ -t 1 ]] && printf '\r\033[K'
    true
}
minutes() { (($1 < 90)) && say "$1 s" || say "$((($1 + 30) / 60)) min"; }
# The time left for the compiler. Some files take 50 times as long as others, so each has a weight: the half seconds of
# cmake/compile_seconds.txt, or 1 when it is not listed there. The files that are done say how long this machine takes for a weight of 1.
declare -A weight=() since=() # since: the files that are being compiled, and when they began
to_do=() next=0 waiting=0 done_weight=0 done_seconds=0 left=''
count_files() { # the sources that Ninja would compile now, in the order in which it starts them
    local seconds source targets=${arch//[^,; ]/}
    targets=$((${#targets} + 1))
    [[ $arch != all ]] || targets=4 # and PTX
    while read -r seconds source; do
        [[ $seconds != '#'* ]] || continue
        [[ $source != *.cu || $source == *_sm90* ]] || seconds=$((seconds * targets))
        weight[$source]=$((2 * seconds))
    done <"$root/cmake/compile_seconds.txt"
    mapfile -t to_do < <("$ninja" -C "$build" -n 2>/dev/null | sed -n 's/^\[.*\.dir\/\(.*\)\.o$/\1/p')
    for source in ${to_do[@]+"${to_do[@]}"}; do waiting=$((waiting + ${weight[$source]:-1})); done
}
begin() { # the next file that waits
    ((next < ${#to_do[@]})) || return 0
    since[${to_do[next]}]=$1
    waiting=$((waiting - ${weight[${to_do[next]}]:-1})) next=$((next + 1))
}
finish() { # finish SOURCE: sets left
    local source work all longest=0 now=$((SECONDS - step_began))
    ((${#to_do[@]})) || return
    while ((next < jobs && next < ${#to_do[@]})); do begin 0; done
    done_weight=$((done_weight + ${weight[$1]:-1})) done_seconds=$((done_seconds + now - ${since[$1]:-$now}))
    unset "since[$1]"
    begin "$now"
    all=$((waiting * done_seconds)) # seconds times done_weight, so that whole numbers do
    for source in "${!since[@]}"; do
        work=$((${weight[$source]:-1} * done_seconds - (now - since[$source]) * done_weight))
        ((work < 0)) || all=$((all + work))
        ((work < longest)) || longest=$work
    done
    all=$((all / jobs))
    ((all > longest)) || all=$longest
    left="$1 ($(minutes $now)"
    ((now < 3 || done_seconds == 0)) || left+=", about $(minutes $((all / done_weight))) left"
    left+=')'
}
times=''
step() { # step NAME everything|progress COMMAND...
    local name=$1 show=$2 log=$logs/${1// /-}.log step_began=$SECONDS
    shift 2
    say "==> $name"
    if ! "$@" 2>&1 | tee "$log" | "$show"; then
        [[ $show == everything ]] || tail -n 30 "$log" | everything
        say "FAILED: $name (the whole log: $log)"
        return 1
    fi
    say "    done in $((SECONDS - step_began)) s"
    times+="${times:+, }$name $((SECONDS - step_began)) s"
}

# ---- what this machine has ----
new_enough() { "$1" -c 'import sys; print(sys.executable); sys.exit(sys.version_info < (3, 10))' 2>/dev/null; }
base=''
for candidate in ${PYTHON:+"$PYTHON"} python3 python3.14 python3.13 python3.12 python3.11 python3.10; do
    if base=$(new_enough "$candidate"); then break; fi
    [[ -z ${PYTHON:-} ]] || die "PYTHON=$PYTHON is not a Python 3.10 or newer"
done
[[ -x $base ]] || die "Python 3.10 or newer is needed (set PYTHON to choose one)"
command -v "${CXX:-c++}" >/dev/null || command -v g++ >/dev/null || command -v clang++ >/dev/null ||
    die "a C++ compiler is needed, e.g. g++ or clang++ (set CXX to choose one)"

find_cmake() { # of the given Python's environment, else beside the base Python, else on PATH; 3.24 or newer
    local found version
    for found in "${1%/*}/cmake" "${base%/*}/cmake" "$(command -v cmake)"; do
        version=$("$found" --version 2>/dev/null) || continue
        [[ $version =~ version\ ([0-9]+)\.([0-9]+) ]] || continue
        ((BASH_REMATCH[1] * 1000 + BASH_REMATCH[2] >= 3024)) && { say "$found"; return; }
    done
    return 1
}
find_ninja() {
    local found
    for found in "${1%/*}/ninja" "${base%/*}/ninja" "$(command -v ninja)"; do
        "$found" --version >/dev/null 2>&1 && { say "$found"; return; }
    done
    return 1
}
find_nvcc() {
    local found
    for found in ${CUDACXX:+"$CUDACXX"} ${CUDA_HOME:+"$CUDA_HOME/bin/nvcc"} nvcc /usr/local/cuda/bin/nvcc \
        "$("$1" -c 'import nvidia, shutil; print(shutil.which("nvcc", path=":".join(p + "/cu13/bin" for p in nvidia.__path__)))' 2>/dev/null)"; do
        found=$(command -v "$found") && "$found" --version >/dev/null 2>&1 && { say "$found"; return; }
    done
    return 1
}
missing() { # missing PYTHON NAME...: those that this Python does not have, one a line
    local python=$1 name
    shift
    for name in "$@"; do
        case $name in
            cmake) find_cmake "$python" >/dev/null || say cmake ;;
            ninja) find_ninja "$python" >/dev/null || say ninja ;;
            nvcc) find_nvcc "$python" >/dev/null || say nvcc ;;
            pytest-xdist) "$python" -c 'from xdist.scheduler import WorkStealingScheduling' >/dev/null 2>&1 || say pytest-xdist ;;
            *) "$python" -c "import $name" >/dev/null 2>&1 || say "$name" ;;
        esac
    done
}
gpu=$(nvidia-smi --query-gpu=name,compute_cap --format=csv,noheader 2>/dev/null | head -n 1) || gpu=''

# ---- what it needs, and from where ----
need=(cmake) want=(ninja numpy)
if [[ $verb == test ]]; then
    need+=(numpy pytest) want=(ninja pytest-xdist ml_dtypes hypothesis rich matplotlib)
    # tests/ladder/test_page.py drives a browser where there is one
    ! command -v chromium-headless-shell chromium chromium-browser google-chrome >/dev/null || want+=(playwright)
fi
# The GPU kernels: all, general or none. Where there is no GPU, a folder that has all of them keeps them.
kernels=general
cached() { sed -n "s/^FLASH_ATTN_$1:[A-Z]*=//p" "$build/CMakeCache.txt" 2>/dev/null; }
if [[ $cuda == off ]]; then
    kernels=''
elif [[ $gpu || $arch || $all ]]; then
    kernels=all
elif [[ $(cached KERNELS) == all && $(cached CUDA) == ON && $(cached ARCH) != native ]]; then
    kernels=all arch=$(cached ARCH)
    say "$build has all GPU kernels for target $arch: they stay (--clean starts afresh)."
fi
if [[ $kernels && ($cuda == on || $arch || $all) ]]; then
    need+=(nvcc)
elif [[ $kernels && $gpu ]]; then
    want+=(nvcc)
fi
# One release of NVIDIA's compiler, every part pinned: a newer nvvm writes PTX that this ptxas refuses.
nvcc_wheels=(nvidia-cuda-nvcc==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-cuda-cccl==13.0.85 nvidia-cuda-runtime==13.0.96)

make_environment() { # it sees what the base Python has
    empty "$venv" || clear_out "$venv"
    make "$venv" || return
    # Without ensurepip (Debian without python3-venv) the base Python's own pip serves the environment.
    "$base" -m venv --system-site-packages "$venv" ||
        "$base" -m venv --system-site-packages --without-pip "$venv"
}
# Writes a file that the environment's Python reads when it starts: it adds the package in this checkout. Where the base Python is an
# environment itself, the file adds what is installed there, which --system-site-packages passes over. The file is in ASCII, because Python
# reads it in the encoding of the user's locale, and does not start if it cannot: other paths are written as bytes.
connect() {
    local folder='' installed=''
    [[ $build -ef $root/build ]] || folder=$build
    ! ours "$venv" || installed=$("$base" -c 'import sys, sysconfig; sys.prefix != sys.base_prefix and print(sysconfig.get_path("purelib"))')
    "$venv/bin/python" - "$(title)" "$root/python" "$folder" "$installed" <<'EOF'
import os, pathlib, sys, sysconfig

title, sources, build, installed = sys.argv[1:]
path = lambda name: f"os.fsdecode({os.fsencode(name)!r})"
plain = sources.isascii() and sources.isprintable() and sources == sources.rstrip()
lines = [title, sources if plain else f"import os, sys; sys.path.append({path(sources)})"]
if build:  # the package looks in build/ of the checkout by itself
    lines.append(f"import os; os.environ.setdefault('FLASH_ATTN_LIBRARY', {path(build + '/libflash_attn_minimal.so')})")
if installed and pathlib.Path(installed).parent.name == f"python{sys.version_info[0]}.{sys.version_info[1]}":
    lines.append(f"import os, site; site.addsitedir({path(installed)})")
file, text = pathlib.Path(sysconfig.get_path("purelib"), "flash_attn_minimal_checkout.pth"), "\n".join(lines) + "\n"
old = file.read_bytes().decode(errors="replace") if file.is_file() else text
if not file.is_file() or old != text:
    file.write_text(text, "ascii")
if old.split("\n")[0] != title:
    print(f"{sys.prefix} imported another checkout's package until now: {old.splitlines()[0].removeprefix('# ')}")
EOF
}
install() { # into the environment
    local name packages=() pip=("$venv/bin/python" -m pip install --disable-pip-version-check --retries 1 --timeout 15)
    for name in "$@"; do
        case $name in
            nvcc) "${pip[@]}" --no-deps --ignore-installed "${nvcc_wheels[@]}" || return ;; # all in one folder, whatever the base has
            cmake) # a script, which names its environment's Python: in a folder that was moved it is there and does not start
                "${pip[@]}" --no-deps --force-reinstall 'cmake>=3.24' || return ;;
            *) packages+=("$name") ;;
        esac
    done
    ((${#packages[@]} == 0)) || "${pip[@]}" "${packages[@]}"
}
python=$venv/bin/python
if ! starts "$venv" && ! step environment progress make_environment; then
    python=$base
    say "Going on with $base, which will not know the package by itself."
elif ! connect; then
    say "$venv cannot be written: its Python will not know the package by itself."
fi
if [[ $kernels && -z $gpu && $cuda != on && -z $arch$all ]] && ! find_nvcc "$python" >/dev/null; then
    kernels=''
    say "No NVIDIA GPU and no nvcc here: building the CPU backend alone (--with-cuda compiles the general GPU kernels, too)."
fi
mapfile -t lacking < <(missing "$python" "${need[@]}" "${want[@]}")
if ((${#lacking[@]})); then
    say "Missing here: ${lacking[*]}"
    # Without network, what is installed may do.
    [[ $python == "$base" ]] || step "install from PyPI" progress install "${lacking[@]}" || true
    mapfile -t lacking < <(missing "$python" "${need[@]}")
    ((${#lacking[@]} == 0)) || die "cannot go on without ${lacking[*]}: install it for $base, or make PyPI reachable"
    mapfile -t lacking < <(missing "$python" "${want[@]}")
    ((${#lacking[@]} == 0)) || say "Going on without: ${lacking[*]}"
fi
cmake=$(find_cmake "$python")
ninja=$(find_ninja "$python") || ninja=''
nvcc=''
if [[ $kernels ]]; then
    nvcc=$(find_nvcc "$python") || say "No nvcc and none could be downloaded: building the CPU backend alone, the GPU ($gpu) stays unused."
fi

# ---- build ----
configuration=(-DFLASH_ATTN_CUDA=OFF)
if [[ $nvcc ]]; then
    if [[ -z $arch && $gpu ]]; then
        # The numbers instead of 'native': a later run where the GPU is not at hand keeps this library.
        arch=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | grep -oE '[0-9]+\.[0-9]+' | tr -d . | sort -u | paste -s -d , -) ||
            arch=native
    elif [[ -z $arch ]]; then
        arch=90
        if [[ $kernels == all ]]; then
            say "No NVIDIA GPU here: compiling all GPU kernels for one target, sm_90 (Hopper). --arch all compiles every target."
        else
            say "No NVIDIA GPU here: compiling the general GPU kernels for one target, sm_90 (Hopper). --all-kernels compiles all of them."
        fi
    fi
    configuration=(-DFLASH_ATTN_CUDA=ON "-DFLASH_ATTN_KERNELS=$kernels" "-DFLASH_ATTN_ARCH=$arch" "-DCMAKE_CUDA_COMPILER=$nvcc")
fi
if [[ $ninja ]]; then
    configuration+=(-G Ninja "-DCMAKE_MAKE_PROGRAM=$ninja")
fi
say "flash-attn-minimal: $("$python" -V) at $python, ${nvcc:+nvcc $nvcc, $kernels kernels, GPU target $arch, }${gpu:-no GPU}, $jobs jobs"
tools="$root $cmake $ninja $nvcc" # a folder configured with other tools starts afresh
[[ $(cat "$build/configured_by" 2>/dev/null || cat "$build/made_by" 2>/dev/null) == "$tools" ]] || configuration+=(--fresh)
step configure progress "$cmake" -S "$root" -B "$build" "${configuration[@]}" -DFLASH_ATTN_TESTS=ON ${defines[@]+"${defines[@]}"} || exit
say "$tools" >"$build/configured_by"
[[ -z $ninja ]] || count_files
((waiting < 40)) ||
    say "    ${#to_do[@]} files to compile: about $(minutes $((waiting / 2 / jobs + 5))) with cores like those of cmake/compile_seconds.txt"
NINJA_STATUS='[%f/%t] ' step compile progress "$cmake" --build "$build" --parallel "$jobs" || exit
export FLASH_ATTN_LIBRARY=$build/libflash_attn_minimal.so PYTHONPATH=$root/python${PYTHONPATH:+:$PYTHONPATH}
how_to_go_on() {
    local name=$venv/bin/python more=0 seconds source
    [[ $name != "$here"/* ]] || name=${name#"$here/"}
    printf -v name %q "$name"
    [[ $python != "$base" ]] || name="PYTHONPATH=$root/python FLASH_ATTN_LIBRARY=$FLASH_ATTN_LIBRARY $base"
    local -a fresh=(env -u PYTHONPATH -u FLASH_ATTN_LIBRARY "$python" -c 'from flash_attn_minimal._core import library; print(library.path())')
    local other
    if [[ $python != "$base" ]] && other=$(cd / && "${fresh[@]}" 2>/dev/null) && ! [[ $other -ef $FLASH_ATTN_LIBRARY ]]; then
        say ""
        say "$name imports another flash_attn_minimal, with the library $other."
        say "To use this build: $name -m pip uninstall flash-attn-minimal"
    fi
    printf -v script %q "$root/build_and_run.sh"
    [[ $here != "$root" ]] || script=./build_and_run.sh
    say ""
    say "How to go on"
    say "  $name -c 'import numpy as np, flash_attn_minimal as fa; q = np.ones((1, 8, 2, 64), np.float32); print(fa.flash_attn_func(q, q, q))'"
    say "  $name -m flash_attn_minimal info    what is built here, and which kernel serves which call"
    [[ $verb == test ]] || say "  $script test    the tests"
    [[ $nvcc && $kernels == general ]] || return 0
    while read -r seconds source; do
        [[ $seconds == '#'* || -f $build/CMakeFiles/flash_attn_minimal.dir/$source.o ]] || more=$((more + seconds))
    done <"$root/cmake/compile_seconds.txt"
    say "  $script --all-kernels    the fast GPU kernels, too: about $(minutes $((more / jobs))) more with $jobs jobs"
}
[[ $verb != build ]] || { say "built $FLASH_ATTN_LIBRARY"; how_to_go_on; exit 0; }

# ---- test, check, bench ----
if [[ $verb == test ]]; then
    native=(-LE quick) tier=(--all)
    [[ $every ]] || native=(-L quick) tier=()
    step CTest everything "${cmake%cmake}ctest" --test-dir "$build" "${native[@]}" --no-tests=error --output-on-failure || exit
    cd "$root"
    # A process for each core, up to 8, if pytest-xdist is there. With a GPU one process, which has the GPU to itself.
    workers=()
    if [[ -z $gpu ]] && "$python" -c 'from xdist.scheduler import WorkStealingScheduling' 2>/dev/null; then
        workers=(-n "$((jobs < 8 ? jobs : 8))" --dist worksteal)
        export OPENBLAS_NUM_THREADS=${OPENBLAS_NUM_THREADS:-1}
    fi
    step pytest everything "$python" -m pytest --durations=15 ${workers[@]+"${workers[@]}"} ${tier[@]+"${tier[@]}"} ${rest[@]+"${rest[@]}"} || exit
    [[ $every ]] || ((${#rest[@]})) || say "These were the quick tests; ./build_and_run.sh test --all runs every test (docs/testing.md)."
    exit 0
fi
devices=$("$python" -c 'import ctypes, sys; print(ctypes.CDLL(sys.argv[1]).fa_cuda_device_count())' "$FLASH_ATTN_LIBRARY")
device=cpu
((devices == 0)) || device=cuda
if [[ $gpu && $nvcc && $device == cpu ]]; then
    say "The library sees no GPU although nvidia-smi does ($gpu): the driver may be older than this compiler's CUDA. Using the CPU."
fi
if [[ $verb == run ]]; then
    checks=()
    if [[ $device == cpu ]]; then # a third of them, which has every kernel, type and option
        for name in tiny varlen causal mask window extreme kvcache fuzz api; do checks+=(--filter "$name/"); done
        checks+=(--quick)
    fi
    step "native checks" everything "$build/test_flash_attn" --device $device ${checks[@]+"${checks[@]}"} || exit
fi
FLASH_ATTN_COMMIT=$(git -C "$root" rev-parse --short HEAD 2>/dev/null) && export FLASH_ATTN_COMMIT
[[ $verb != run || $device == cpu ]] || rest=(--quick ${rest[@]+"${rest[@]}"}) # the whole table takes the GPU's standard attention minutes
step benchmark everything "$build/test_flash_attn" --device $device --bench --json "$build/benchmark.json" ${rest[@]+"${rest[@]}"} || exit
[[ $verb != bench ]] || exit 0

# ---- what this machine got ----
cd "$root"
"$python" - "$build/benchmark.json" <<'EOF'
import ctypes, json, os, statistics, sys

path = os.environ["FLASH_ATTN_LIBRARY"]
library = ctypes.CDLL(path)
library.fa_kernel_name.restype = library.fa_build_info.restype = ctypes.c_char_p
with open(sys.argv[1]) as file:
    report = json.load(file)
gpu, host, rows = report["machine"]["gpu"], report["machine"]["host"], report["rows"]
shape = lambda row: tuple(row[key] for key in ("dtype", "headdim", "causal", "seqlen_q", "batch", "nheads"))
describe = lambda row: f"{row['dtype']}, seqlen {row['seqlen_q']}, headdim {row['headdim']}{', causal' * row['causal']}"
ours = [row for row in rows if row["system"] == "ours"]
standard = {shape(row): row for row in rows if row["system"] == "standard"}
gains = [standard[shape(row)]["us"] / row["us"] for row in ours if shape(row) in standard]
worst = max(ours, key=lambda row: row["max_err"] / row["err_budget"])
fastest = max(ours, key=lambda row: row["tflops"])
speed = f"{fastest['tflops']:.1f} TFLOP/s" if gpu else f"{1000 * fastest['tflops']:.0f} GFLOP/s"
kernels = [library.fa_kernel_name(i).decode() for i in range(library.fa_kernel_count()) if library.fa_kernel_device(i) == 1 + bool(gpu)]
print(f"""
What this machine got
  device    {gpu or host + ': CPU backend (no usable GPU, or no GPU kernels in this build)'}
  kernels   {', '.join(sorted({row['kernel'] for row in ours}))} chosen, of {', '.join(kernels)}
  correct   native checks passed; closest to its limit: error {worst['max_err']:.1e} of {worst['err_budget']:.1e} ({describe(worst)})
  speed-up  {min(gains):.1f}x to {max(gains):.1f}x over standard attention ({', '.join(sorted({r['kernel'] for r in standard.values()}))}), median {statistics.median(gains):.1f}x
  fastest   {speed} ({describe(fastest)})
  library   {path} ({library.fa_build_info().decode()})""")
EOF

# ---- the same story with flash attention and with standard attention, in turns: which is how fast ----
where=cpu
[[ $device == cpu ]] || ! "$python" -c 'import cupy' 2>/dev/null || where=cuda
say ""
if "$python" -c 'import numpy' 2>/dev/null; then
    "$python" -m flash_attn_lab compare --device $where
    say ""
else
    say "Without NumPy there is no story, and $python cannot import the package: install numpy for it."
fi
say "All of it took $(minutes $((SECONDS - began))): $times."
how_to_go_on
