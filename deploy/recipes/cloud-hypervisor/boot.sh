#!/bin/sh
# Boots a VM under Cloud Hypervisor, waits until its cloud-init is done, and takes it out. `common.sh` has the
# variables.
#
#   BRIDGE=br0 USER_DATA=web-1.yaml NAME=web-1 ./boot.sh --firmware hypervisor-fw --disk path=debian.raw
#
# Further options of Cloud Hypervisor follow the script's own.
here=$(dirname "$0")
. "$here/../common.sh"
prepare

# Since v53 these two are also called system_serial_number and system_uuid; the older names still work.
cloud-hypervisor --cpus boot=1 --memory size=1G --net "tap=$tap,mac=$mac" \
  --platform "serial_number=$seed,uuid=$uuid" --serial "file=$console" --console off "$@" </dev/null &
finish $!
