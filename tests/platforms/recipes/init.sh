#!/bin/sh
# The first process of the guest: loads the NIC's driver, and runs cloud-init's stages in the order of its services.
export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev
mount -t tmpfs tmpfs /run
mount -t tmpfs tmpfs /tmp
while read -r module; do insmod "/modules/$module.ko"; done </modules/list
ip link set lo up
# A generator of systemd runs this one. `--force`: a first boot.
/usr/lib/cloud-init/ds-identify --force
cloud-init init --local
ifup -a
cloud-init init
cloud-init modules --mode=config
cloud-init modules --mode=final
# The host ends the guest.
exec sleep 100000
