#!/usr/bin/env bash
# control-plane.sh ADDRESS: the cluster without kube-proxy, ebpfproxy in its place, flannel. May be run again.
set -euo pipefail
here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
# shellcheck source=../versions.env
source "$here/../versions.env"
address=$1
handout=/srv/handout
export DEBIAN_FRONTEND=noninteractive KUBECONFIG=/etc/kubernetes/admin.conf

# The image, for this node and for the others, which fetch it.
apt-get install --yes --quiet buildah python3
mkdir -p "$handout"
buildah build --file "$here/../../deploy/Dockerfile" --tag "$IMAGE" "$here/../.."
rm -f "$handout/image.tar"
buildah push "$IMAGE" "oci-archive:$handout/image.tar:$IMAGE"
ctr --namespace k8s.io images import "$handout/image.tar"

# The last thing that init does; what an init that failed left would be refused by the next one.
if ! kubectl --namespace kube-public get configmap cluster-info >/dev/null 2>&1; then
  kubeadm reset --force
  kubeadm init --skip-phases=addon/kube-proxy --kubernetes-version="$KUBERNETES_VERSION" \
    --apiserver-advertise-address="$address" --pod-network-cidr="$POD_NETWORK"
fi
mkdir -p /home/vagrant/.kube
install --owner=vagrant --group=vagrant --mode=600 "$KUBECONFIG" /home/vagrant/.kube/config

# First the Services: flannel finds the API server by one.
kubectl apply --kustomize "$here/../cluster"
# Not by --iface-can-reach: to its own address the control plane goes by lo.
network=${address%.*}.
flannel=https://github.com/flannel-io/flannel/releases/download/$FLANNEL_VERSION/kube-flannel.yml
curl --fail --silent --show-error --location "$flannel" |
  sed "s/^\( *\)- --kube-subnet-mgr\$/&\n\1- --iface-regex=^${network//./[.]}/" |
  kubectl apply --filename=-

kubeadm token create --ttl 0 --print-join-command >"$handout/join" # for a worker that is made anew later, too
cat >/etc/systemd/system/handout.service <<END
[Unit]
Description=The image and the way to join, for the workers of this throw-away cluster
Wants=network-online.target
After=network-online.target
[Service]
Restart=on-failure
RestartSec=2
ExecStart=/usr/bin/python3 -m http.server --bind $address --directory $handout $HANDOUT_PORT
[Install]
WantedBy=multi-user.target
END
systemctl daemon-reload
systemctl enable --now handout.service
