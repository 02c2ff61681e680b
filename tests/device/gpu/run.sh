#!/usr/bin/env bash
# run.sh STEP ...: run numbered steps of the kit, or all of them. `run.sh --help` lists the options; PYTHON names the
# interpreter (python3 by default), of the version that the kit is for.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
exec env PYTHONPATH="$PWD" "${PYTHON:-python3}" -m tests.device.gpu.steps "$@"
