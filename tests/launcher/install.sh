#!/usr/bin/env bash
# Installs the launchers that the tests start, and what makes hosts of their own: as root, where there
# is apt-get. Elsewhere it says so and succeeds, for those tests skip and say why.
set -euo pipefail

packages=(slurm-wlm munge openmpi-bin mpich iproute2)
policy=/usr/sbin/policy-rc.d

give_up() {
    echo "$1: the tests that need ${missing[*]} will skip"
    exit 0
}

missing=()
for command in slurmctld slurmd srun munged mpiexec.openmpi mpiexec.mpich ip; do
    command -v "$command" >/dev/null || missing+=("$command")
done
[ "${#missing[@]}" -gt 0 ] || exit 0
[ "$(id -u)" -eq 0 ] || give_up "not root"
command -v apt-get >/dev/null || give_up "no apt-get"

if [ ! -e "$policy" ]; then # so that no package starts its service
    trap 'rm -f "$policy"' EXIT
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod 755 "$policy"
fi
export DEBIAN_FRONTEND=noninteractive
apt-get -qq update || give_up "apt-get update failed"
apt-get -qq -y install --no-install-recommends "${packages[@]}" || give_up "apt-get install failed"
