#!/bin/sh
# Boots a VM under Cloud Hypervisor, waits until its cloud-init is done, and takes it out. `common.sh` has the
# variables.
#
#   BRIDGE=br0 USER_DATA=user-data.yaml NAME=web-1 ./boot.sh --firmware CLOUDHV.fd --disk path=debian.raw,image_type=raw
#
# Further options of Cloud Hypervisor follow the script's own. rust-hypervisor-firmware does not do: it gives
# the guest no SMBIOS tables, where cloud-init looks for the seed.
here=$(dirname "$0")
. "$here/../common.sh"
usage_of "$@"
prepare cloud-hypervisor

# v53 calls these two system_serial_number and system_uuid, and accepts the older names with a warning.
cloud-hypervisor --cpus boot=1 --memory size=1G --net "tap=$tap,mac=$mac" \
  --platform "serial_number=$seed,uuid=$uuid" --serial "file=$console" --console off "$@" </dev/null &
finish $!
