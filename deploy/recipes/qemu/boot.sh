#!/bin/sh
# Boots a VM under QEMU, waits until its cloud-init is done, and takes it out. `common.sh` has the variables.
#
#   BRIDGE=br0 USER_DATA=user-data.yaml NAME=web-1 ./boot.sh -drive file=debian.qcow2,if=virtio,snapshot=on
#
# Further options of QEMU follow the script's own, and override them.
here=$(dirname "$0")
. "$here/../common.sh"
usage_of "$@"
# /dev/kvm may exist on a processor without the feature, and a guest then hangs.
accel=tcg
if [ -w /dev/kvm ] && grep -qw -e vmx -e svm /proc/cpuinfo; then accel=kvm; fi
prepare qemu-system-x86_64

qemu-system-x86_64 -name "$name" -machine q35,accel=$accel -cpu max -m 1024 -nodefaults -display none \
  -uuid "$uuid" -smbios "type=1,serial=$seed" \
  -netdev "tap,id=n0,ifname=$tap,script=no,downscript=no" \
  -device "virtio-net-pci,netdev=n0,mac=$mac,romfile=" -device virtio-rng-pci \
  -serial "file:$console" "$@" </dev/null &
finish $!
