#!/bin/sh
# Boots a VM under Firecracker, waits until its cloud-init is done, and takes it out. `common.sh` has the variables.
#
#   BRIDGE=br0 USER_DATA=user-data.yaml NAME=web-1 ./boot.sh vmlinux rootfs.ext4 [initrd.img]
#
# The root file system is written to: boot a copy. A distribution's kernel needs its initrd, because its drivers are
# modules.
here=$(dirname "$0")
. "$here/../common.sh"
usage_of "$@"
case $# in
  2) initrd= ;;
  3) initrd="\"initrd_path\": \"$3\", " ;;
  *) fail "expected a kernel, a root file system and perhaps an initrd, as in: $0 vmlinux rootfs.ext4 [initrd.img]" ;;
esac
prepare firecracker

# A microVM has no SMBIOS: the kernel's command line tells cloud-init where to ask. Without `mmds-config` Firecracker
# leaves the metadata address alone.
cat >"$room/vm.json" <<EOF
{
  "boot-source": {"kernel_image_path": "$1", $initrd"boot_args": "console=ttyS0 reboot=k panic=1 $seed"},
  "drives": [{"drive_id": "root", "path_on_host": "$2", "is_root_device": true, "is_read_only": false}],
  "machine-config": {"vcpu_count": 1, "mem_size_mib": 1024},
  "network-interfaces": [{"iface_id": "n0", "guest_mac": "$mac", "host_dev_name": "$tap"}]
}
EOF
firecracker --no-api --config-file "$room/vm.json" </dev/null >"$console" 2>&1 &
finish $!
