//! Platforms other than Kubernetes: libvirt, OpenStack, Proxmox VE, and hypervisors started by a script.

mod libvirt;
mod openstack;
mod proxmox;
mod recipes;
mod without_ovn;
