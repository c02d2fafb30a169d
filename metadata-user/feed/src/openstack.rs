//! The feed of an OpenStack compute node: one record for each instance on it, from OVS and OVN, or from libvirt; its
//! answers are Nova's.
//!
//! ```text
//!  local OVSDB: Interface ──────┐
//!                               ├─► ports ─► record (whose NICs, which project) ─► agent
//!  OVN southbound: Port_Binding ┤                                                   │
//!  or libvirt's running domains ┘                                                   │
//!  Nova's metadata API ◄── nova: signed requests ◄── orders ── what guests ask ◄────┘
//! ```
//!
//! Nothing above the node changes: Neutron and Nova do as with Neutron's metadata agents, whose part this agent takes.
//! A record says only which ports are whose. What its guest asks is asked of Nova, as instance and project that the two
//! databases, or libvirt, name; no byte of the request decides that.

pub mod domains;
pub mod health;
pub mod import;
pub mod nova;
pub mod ovsdb;
mod ports;
pub mod presence;
mod source;
pub mod tls;

pub use source::OpenstackSource;
pub use tls::TlsFiles;

use metadata_content::record::Dialect;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

use crate::libvirt::RUNNING;

/// Default of `openstack.nova.secret`.
pub const DEFAULT_SECRET: &str = "/etc/xdp-imds/nova-secret";
/// Default of `openstack.ovsdb`.
pub const DEFAULT_OVSDB: &str = "unix:/run/openvswitch/db.sock";

/// Where the agent finds the instances of a node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum InstanceOrigin {
    /// The local OVSDB and OVN's southbound database.
    #[default]
    Ovn,
    /// libvirt's running domains, where Neutron uses ML2/OVS or Linux bridges.
    Libvirt,
}

/// How the agent finds and serves the instances of an OpenStack compute node.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct OpenstackOptions {
    /// Nova's metadata API, which answers the guests.
    pub nova: NovaOptions,
    /// Where instances are found: `ovn`, the default, or `libvirt` where Neutron uses ML2/OVS or Linux bridges without
    /// OVN. With `libvirt`, Nova must be Wallaby (23.0) or later.
    pub instances: InstanceOrigin,
    /// With `instances: libvirt`: the directory in which libvirt keeps what it knows of each running domain.
    pub domains: PathBuf,
    /// The local OVSDB, which has the node's ports: `unix:PATH` or `tcp:HOST:PORT`. It and the next three are of OVN.
    pub ovsdb: String,
    /// Servers of OVN's southbound database, separated by commas: `tcp:HOST:PORT` or `ssl:HOST:PORT`. Default:
    /// what ovn-controller uses, `external_ids:ovn-remote` of the local OVSDB.
    pub southbound: Option<String>,
    /// The files for `ssl:` of `southbound`: those of ovn-controller. Its certificates name no host, and none is checked.
    pub tls: TlsFiles,
    /// The node's name in OVN. Default: `external_ids:system-id` of the local OVSDB.
    pub chassis: Option<String>,
    /// Whether the agent writes to `external_ids` of this node's `Chassis_Private` in the southbound database what
    /// Neutron lists it by, and knows that it is alive: `openstack network agent list`.
    pub listed: bool,
    /// Dialects that the agent answers itself, in front of Nova's tree, from what it knows of an instance: its ids and
    /// addresses. Default: none.
    pub dialects: Vec<Dialect>,
    /// The region of all instances, for `dialects`.
    pub region: String,
    /// The zone of all instances, preferably `<region>-<x>`, for `dialects`.
    pub zone: String,
}

impl Default for OpenstackOptions {
    fn default() -> Self {
        Self {
            nova: NovaOptions::default(),
            instances: InstanceOrigin::default(),
            domains: RUNNING.into(),
            ovsdb: DEFAULT_OVSDB.into(),
            southbound: None,
            tls: TlsFiles::default(),
            chassis: None,
            listed: true,
            dialects: Vec::new(),
            region: "local".into(),
            zone: "local-a".into(),
        }
    }
}

impl OpenstackOptions {
    /// The first field that has no effect with `instances`, and why.
    #[must_use]
    pub fn conflict(&self) -> Option<(&'static str, &'static str)> {
        let default = Self::default();
        let of_ovn = [
            ("openstack.ovsdb", self.ovsdb != default.ovsdb),
            ("openstack.southbound", self.southbound.is_some()),
            ("openstack.tls", self.tls != default.tls),
            ("openstack.chassis", self.chassis.is_some()),
        ];
        let of_libvirt = [("openstack.domains", self.domains != default.domains)];
        let (fields, why): (&[_], _) = match self.instances {
            InstanceOrigin::Ovn => (&of_libvirt, "nothing, or `instances: libvirt` beside it"),
            InstanceOrigin::Libvirt => (&of_ovn, "nothing, because `instances: libvirt` asks no database"),
        };
        fields.iter().find(|(_, is_set)| *is_set).map(|(field, _)| (*field, why))
    }
}

/// `openstack.nova`: where Nova's metadata API is, and how to ask it.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct NovaOptions {
    /// Its address: `http://HOST:PORT` or `https://HOST:PORT`.
    pub url: String,
    /// The file with the secret that Nova checks signatures by: `metadata_proxy_shared_secret` of `[neutron]` in
    /// `nova.conf`. After a change the agent reads it again as soon as Nova refuses the former one.
    pub secret: PathBuf,
    /// The files for `https:`.
    pub tls: TlsFiles,
}

impl Default for NovaOptions {
    fn default() -> Self {
        Self { url: "http://127.0.0.1:8775".into(), secret: DEFAULT_SECRET.into(), tls: TlsFiles::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::{InstanceOrigin, NovaOptions, OpenstackOptions, OpenstackSource, TlsFiles};
    use crate::source::Source as _;

    #[test]
    fn checks_name_each_file_that_is_absent_by_itself() {
        let absent = "/absent/file";
        let nova = NovaOptions { secret: absent.into(), ..NovaOptions::default() };
        let tls = TlsFiles { ca: Some(absent.into()), ..TlsFiles::default() };
        let with_ovn = OpenstackOptions { nova, tls, ..OpenstackOptions::default() };
        let libvirt = InstanceOrigin::Libvirt;
        let without_ovn = OpenstackOptions { instances: libvirt, domains: absent.into(), ..with_ovn.clone() };
        for (options, names) in [
            (with_ovn, ["openstack.configuration", "openstack.secret"]),
            (without_ovn, ["openstack.domains", "openstack.secret"]),
        ] {
            let checks = OpenstackSource::new(options).preflight();
            assert_eq!(checks.iter().map(|check| check.name).collect::<Vec<_>>(), names);
            for check in checks {
                assert!(check.found.contains("/absent/file"), "{check:?}");
                assert!(check.found.contains("No such file or directory"), "{check:?}");
            }
        }
    }
}
