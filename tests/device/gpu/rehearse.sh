#!/usr/bin/env bash
# rehearse.sh [KIT]: from an empty directory to the last JSON, on the simulated runtime, without any network.
# What travels to a machine is copied into a new directory: what git knows or does not ignore, and the parts of the kit
# (default gpu-kit). There an interpreter without packages runs all steps, in a network namespace of its own.
#   PYTHON  interpreter of the version that the kit is for (default python3.12)
#   PEERS   interpreter of an environment with torch, for DCP (default: none)
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
kit=$(realpath "${1:-$root/gpu-kit}")
place=$(mktemp -d "${TMPDIR:-/tmp}/gpu-rehearsal-XXXXXX")
machine=$place/machine
mkdir -p "$machine/gpu-kit" "$place/out"
cd "$root"
git ls-files -z --cached --others --exclude-standard | xargs -0 cp --parents --no-dereference -t "$machine"
cp -r "$kit"/[0-9]* "$machine/gpu-kit"
echo "[kit] $(du -sm --exclude=gpu-kit "$machine" | cut -f1) MiB of working tree, in $machine"
"${PYTHON:-python3.12}" -m venv "$place/venv"
cd "$machine"
# The limits are for 16 cores.
options=(all --runtime simulated --small --stretch 4)
[[ -n ${PEERS:-} ]] && options+=(--peers "$PEERS")
# Nothing of this shell but what any shell has. The loopback interface is all that is there, and ranks need it.
unshare --user --map-root-user --net env -i PATH="$PATH" HOME="$place" LANG=C.UTF-8 OUT="$place/out" \
    PYTHON="$place/venv/bin/python" bash -c '
        ip link set lo up
        echo "[kit] network interfaces: $(ip -o link | cut -d: -f2 | xargs)"
        exec bash tests/device/gpu/run.sh "$@"' run "${options[@]}" || status=$?
ls -l "$place/out"
echo "[kit] all of it is in $place"
exit "${status:-0}"
