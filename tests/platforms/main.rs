//! Platforms other than Kubernetes: libvirt, Proxmox VE, and hypervisors started by a script.

mod libvirt;
mod proxmox;
mod recipes;
