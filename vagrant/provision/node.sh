#!/usr/bin/env bash
# node.sh ADDRESS: what kubeadm needs on every node. May be run again.
set -euo pipefail
here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
# shellcheck source=../versions.env
source "$here/../versions.env"
address=$1
export DEBIAN_FRONTEND=noninteractive

swapoff --all
sed -i '/\sswap\s/d' /etc/fstab

printf '%s\n' overlay br_netfilter >/etc/modules-load.d/kubernetes.conf
modprobe --all overlay br_netfilter
printf '%s\n' net.ipv4.ip_forward=1 net.bridge.bridge-nf-call-iptables=1 >/etc/sysctl.d/90-kubernetes.conf
sysctl --quiet --system

apt-get update --quiet
apt-get install --yes --quiet ca-certificates containerd curl gnupg
mkdir -p /etc/containerd /etc/apt/keyrings
containerd config default | sed 's/SystemdCgroup = false/SystemdCgroup = true/' >/etc/containerd/config.toml
systemctl restart containerd

repository=https://pkgs.k8s.io/core:/stable:/$KUBERNETES_MINOR/deb/
curl --fail --silent --show-error --location "${repository}Release.key" |
  gpg --batch --yes --dearmor --output /etc/apt/keyrings/kubernetes.gpg
echo "deb [signed-by=/etc/apt/keyrings/kubernetes.gpg] $repository /" >/etc/apt/sources.list.d/kubernetes.list
apt-get update --quiet
apt-get install --yes --quiet --allow-change-held-packages \
  "kubeadm=$KUBERNETES_PACKAGE" "kubectl=$KUBERNETES_PACKAGE" "kubelet=$KUBERNETES_PACKAGE"
apt-mark hold kubeadm kubectl kubelet
# The first device of a Vagrant machine has the same address on all of them.
echo "KUBELET_EXTRA_ARGS=--node-ip=$address" >/etc/default/kubelet
