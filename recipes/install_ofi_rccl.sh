#!/usr/bin/env bash
# Build the libfabric plugin of RCCL (aws-ofi-rccl) on a Slingshot machine such as Frontier, LUMI or Setonix.
# Without it RCCL uses TCP between nodes, at a fraction of the network's speed. Run it on a login node.
# It was written after the documentation of these systems and has not been run on one of them.
set -euo pipefail

usage() {
    cat << 'TEXT'
usage: install_ofi_rccl.sh --rocm VERSION [options]
  --rocm VERSION       version of ROCm: 6.3.1 loads the module rocm/6.3.1
  --prefix DIR         where to install            (default: $HOME/ofi-rccl/rocm-VERSION)
  --libfabric DIR      Cray's libfabric            (default: the newest of /opt/cray/libfabric)
  --rocm-path DIR      ROCm itself                 (default: $ROCM_PATH of the module, or /opt/rocm-VERSION)
  --source DIR|URL     source of the plugin        (default: https://github.com/ROCm/aws-ofi-rccl)
  --ref NAME           branch, tag or commit       (default: the default branch)
  --modules "A B"      further modules to load     (default: PrgEnv-gnu)
  --jobs N             parallel compilations       (default: 8)
  --trace              build with tracing, for debugging
  --dry-run            print the commands only
TEXT
}

fail() {
    echo "error: $*" >&2
    exit 2
}

rocm="" prefix="" libfabric="" rocm_path="" ref="" modules="PrgEnv-gnu" jobs=8 trace="" dry_run=""
source="https://github.com/ROCm/aws-ofi-rccl"
while [ $# -gt 0 ]; do
    case $1 in
        --rocm | --prefix | --libfabric | --rocm-path | --source | --ref | --modules | --jobs)
            [ $# -ge 2 ] || fail "$1 needs a value"
            name=${1#--}
            printf -v "${name//-/_}" '%s' "$2"
            shift 2
            ;;
        --trace) trace=yes && shift ;;
        --dry-run) dry_run=yes && shift ;;
        -h | --help) usage && exit 0 ;;
        *) usage >&2 && fail "unknown option $1" ;;
    esac
done
[[ $rocm =~ ^[0-9]+\.[0-9]+(\.[0-9]+)?$ ]] || fail "give the version of ROCm: --rocm 6.3.1"
[[ $jobs =~ ^[1-9][0-9]*$ ]] || fail "--jobs $jobs is not a number"

run() {
    printf '+ %s\n' "$*"
    [ -n "$dry_run" ] || "$@"
}

if [ -n "$modules" ] && type module > /dev/null 2>&1; then
    # shellcheck disable=SC2086  # several modules
    run module load $modules "rocm/$rocm"
fi
rocm_path=${rocm_path:-${ROCM_PATH:-/opt/rocm-$rocm}}
prefix=${prefix:-$HOME/ofi-rccl/rocm-$rocm}
if [ -z "$libfabric" ]; then
    newest=$(printf '%s\n' /opt/cray/libfabric/*/ | sort -V | tail -n 1)
    libfabric=${newest%/}
fi
for folder in "$rocm_path" "$libfabric/include"; do
    [ -n "$dry_run" ] || [ -d "$folder" ] || fail "there is no folder $folder: give --rocm-path and --libfabric"
done
for tool in git autoreconf make; do
    [ -n "$dry_run" ] || command -v "$tool" > /dev/null || fail "$tool is missing: load the modules autotools and libtool"
done

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if [ -d "$source" ]; then
    run cp -r "$source" "$work/plugin"
else
    run git clone --quiet "$source" "$work/plugin"
fi
[ -n "$dry_run" ] || cd "$work/plugin"
[ -z "$ref" ] || run git checkout --quiet "$ref"
run ./autogen.sh
options=("--prefix=$prefix" "--with-libfabric=$libfabric" "--with-hip=$rocm_path" "--with-rccl=$rocm_path" "--disable-tests")
[ -z "$trace" ] || options+=(--enable-trace)
run env CC=hipcc ./configure "${options[@]}"
run make "-j$jobs"
run make install

library=$prefix/lib/librccl-net.so
if [ -z "$dry_run" ]; then
    [ -e "$library" ] || fail "$library was not built"
    missing=$(ldd "$library" | grep 'not found' || true)
    [ -z "$missing" ] || fail "$library lacks libraries: $missing"
fi
cat << TEXT
The plugin is in $prefix/lib. Add it to site.toml, so that every job finds it:

[environment.LD_LIBRARY_PATH]
value = "$prefix/lib:$libfabric/lib64:\$LD_LIBRARY_PATH"
reason = "RCCL's plugin for Slingshot"

A job with NCCL_DEBUG=INFO must say 'NET/OFI' and not 'NET/Socket'.
TEXT
