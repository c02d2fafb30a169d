//! The section `proxmox` of the configuration.

use std::path::PathBuf;

use serde::Deserialize;

/// Default directory of configurations: those of the VMs that are on this node.
pub const DEFAULT_DIRECTORY: &str = "/etc/pve/qemu-server";

/// Default directory of files with parts of records.
pub const DEFAULT_FILES: &str = "/etc/xdp-imds/proxmox";

/// How the agent finds and serves the VMs of a Proxmox VE node; `proxmox: {}` serves every VM on it.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Options {
    /// Directory of the VMs' configurations, `<vmid>.conf`.
    pub directory: PathBuf,
    /// Directory of files with parts of records: `defaults.yaml` for all VMs, `<vmid>.yaml` for one.
    pub files: PathBuf,
    /// The configuration of the cluster's storages, which hold the files that `cicustom` names.
    pub storages: PathBuf,
    /// The name of the cluster, in the subjects and ids of its VMs; by default that of `corosync`, and `local` for a node
    /// without a cluster. Set it before such a node joins one: with another name its VMs have other owners.
    pub cluster: Option<String>,
    /// The configuration of the cluster, which names it.
    pub corosync: PathBuf,
    /// The node's resolvers, for VMs without `nameserver` or `searchdomain`.
    pub resolv_conf: PathBuf,
    /// The region of all VMs.
    pub region: String,
    /// The zone of all VMs, preferably `<region>-<x>`.
    pub zone: String,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            directory: DEFAULT_DIRECTORY.into(),
            files: DEFAULT_FILES.into(),
            storages: "/etc/pve/storage.cfg".into(),
            cluster: None,
            corosync: "/etc/pve/corosync.conf".into(),
            resolv_conf: "/etc/resolv.conf".into(),
            region: "local".into(),
            zone: "local-a".into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{DEFAULT_DIRECTORY, Options};
    use std::path::Path;

    #[test]
    fn absent_options_have_defaults_and_unknown_ones_are_refused() {
        let options: Options = serde_yaml::from_str("{}").expect("all defaults");
        assert_eq!(options, Options::default());
        let options: Options = serde_yaml::from_str("{files: /parts, region: eu}").expect("options");
        assert_eq!(options.directory, Path::new(DEFAULT_DIRECTORY));
        assert_eq!((options.files.as_path(), &*options.region), (Path::new("/parts"), "eu"));
        serde_yaml::from_str::<Options>("{directry: /etc/pve}").expect_err("a typo");
    }
}
