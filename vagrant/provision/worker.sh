#!/usr/bin/env bash
# worker.sh ADDRESS: join the cluster, with the image that the control plane built. May be run again.
set -euo pipefail
here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
# shellcheck source=../versions.env
source "$here/../versions.env"

handout=http://$CONTROL_ADDRESS:$HANDOUT_PORT
fetched=$(mktemp --directory)
trap 'rm -rf "$fetched"' EXIT
curl --fail --silent --show-error --output "$fetched/image.tar" "$handout/image.tar"
ctr --namespace k8s.io images import "$fetched/image.tar"

# The kubelet's own credentials, which it has got once it has joined; what a join that failed left goes first.
if ! test -e /var/lib/kubelet/pki/kubelet-client-current.pem; then
  kubeadm reset --force
  curl --fail --silent --show-error --output "$fetched/join" "$handout/join"
  read -r -a join <"$fetched/join"
  # kubeadm knows nothing of kernels as old as one of the workers'.
  "${join[@]}" --ignore-preflight-errors=SystemVerification
fi
