//! Reads the configuration of Neutron's metadata agents: oslo.config's ini files.

use rustix::io::Errno;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::{fs, io};

use super::{DEFAULT_OVSDB, DEFAULT_SECRET, InstanceOrigin, NovaOptions, OpenstackOptions, TlsFiles};
use crate::state::private_file;

/// Where Neutron's packages put them: those of the OVN agent, of the OVN metadata agent, and of the metadata agent; and
/// those of the agents that connect ports without OVN.
pub const FILES: [&str; 5] = [
    "/etc/neutron/ovn_agent.ini",
    "/etc/neutron/neutron_ovn_metadata_agent.ini",
    "/etc/neutron/metadata_agent.ini",
    "/etc/neutron/plugins/ml2/openvswitch_agent.ini",
    "/etc/neutron/plugins/ml2/linuxbridge_agent.ini",
];
/// The names of the last two.
const WITHOUT_OVN: [&str; 2] = ["openvswitch_agent.ini", "linuxbridge_agent.ini"];
/// Most bytes of a file. With all comments of Neutron's samples one has 60 KiB.
const FILE_BYTES: usize = 1 << 20;

/// What Neutron's files say.
#[derive(Clone, PartialEq, Eq)]
pub struct NeutronSettings {
    options: OpenstackOptions,
    /// The secret, which is not part of the configuration.
    secret: Option<String>,
    /// What has no counterpart here, or needs a look, but for a missing secret: a sentence each.
    remarks: Vec<String>,
}

impl NeutronSettings {
    /// Reads files; later ones override earlier ones, as with oslo.config.
    ///
    /// # Errors
    /// A file cannot be read, or its secret or protocol cannot be used.
    pub fn read(files: &[PathBuf]) -> io::Result<Self> {
        let mut values = BTreeMap::new();
        for path in files {
            let named =
                |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", path.display()));
            let bytes = private_file::read(path, FILE_BYTES).map_err(named)?;
            let bytes = bytes.ok_or_else(|| named(Errno::NOENT.into()))?;
            values.append(&mut parse(&String::from_utf8_lossy(&bytes)));
        }
        let names = || files.iter().filter_map(|path| path.file_name()?.to_str());
        // A node that has moved to OVN may still have the files of its former agents.
        let has_ovn =
            names().any(|name| name.contains("ovn")) || values.keys().any(|(section, _)| section == "ovn");
        let is_without = !has_ovn && names().any(|name| WITHOUT_OVN.contains(&name));
        let instances = if is_without { InstanceOrigin::Libvirt } else { InstanceOrigin::Ovn };
        Ok(Self::of(&values, instances))
    }

    fn of(values: &BTreeMap<(String, String), String>, instances: InstanceOrigin) -> Self {
        let get = |section: &str, key: &str| {
            let value = values.get(&(section.to_owned(), key.to_owned()));
            value.map(String::as_str).filter(|value| !value.is_empty())
        };
        let file = |section, key| get(section, key).map(PathBuf::from);
        let protocol = get("DEFAULT", "nova_metadata_protocol").unwrap_or("http");
        let host = get("DEFAULT", "nova_metadata_host").unwrap_or("127.0.0.1");
        let port = get("DEFAULT", "nova_metadata_port").unwrap_or("8775");
        let host = if host.contains(':') { format!("[{host}]") } else { host.to_owned() };
        let nova = NovaOptions {
            url: format!("{protocol}://{host}:{port}"),
            secret: DEFAULT_SECRET.into(),
            tls: TlsFiles {
                ca: file("DEFAULT", "auth_ca_cert"),
                certificate: file("DEFAULT", "nova_client_cert"),
                key: file("DEFAULT", "nova_client_priv_key"),
            },
        };
        let of_ovn = OpenstackOptions {
            ovsdb: ovsdb(get("ovs", "ovsdb_connection")),
            southbound: get("ovn", "ovn_sb_connection").map(str::to_owned),
            tls: TlsFiles {
                ca: file("ovn", "ovn_sb_ca_cert"),
                certificate: file("ovn", "ovn_sb_certificate"),
                key: file("ovn", "ovn_sb_private_key"),
            },
            ..OpenstackOptions::default()
        };
        let options = match instances {
            InstanceOrigin::Ovn => OpenstackOptions { nova, ..of_ovn },
            InstanceOrigin::Libvirt => OpenstackOptions { nova, instances, ..OpenstackOptions::default() },
        };
        let secret = get("DEFAULT", "metadata_proxy_shared_secret").map(str::to_owned);
        let mut remarks = Vec::new();
        if instances == InstanceOrigin::Libvirt && get("DEFAULT", "nova_metadata_host").is_none() {
            remarks.push(
                "the files have no nova_metadata_host: name the metadata_agent.ini of a network node too, or set \
                 openstack.nova.url"
                    .into(),
            );
        }
        if get("DEFAULT", "nova_metadata_insecure").is_some_and(is_true) {
            remarks.push(
                "nova_metadata_insecure is not taken over: name the authority of Nova's certificate in openstack.nova.tls.ca"
                    .into(),
            );
        }
        Self { options, secret, remarks }
    }

    /// The section of the configuration, in JSON, which is YAML as well. It has only what differs from the defaults.
    #[must_use]
    pub fn section(&self) -> Value {
        let defaults = json!(OpenstackOptions::default());
        json!({"openstack": without(&json!(self.options), &defaults)})
    }

    /// What has no counterpart here, or needs a look: a sentence each. It names the file of the secret.
    #[must_use]
    pub fn remarks(&self) -> Vec<String> {
        let file = self.options.nova.secret.display();
        let secret = self.secret.is_none().then(|| {
            format!(
                "the files have no metadata_proxy_shared_secret: write that of nova.conf's [neutron] to {file}"
            )
        });
        secret.into_iter().chain(self.remarks.iter().cloned()).collect()
    }

    /// Writes the secret to a file that only its owner may read.
    ///
    /// # Errors
    /// The file exists with another secret, or cannot be written.
    pub fn write_secret(&self, path: &Path) -> io::Result<bool> {
        let Some(secret) = &self.secret else { return Ok(false) };
        match fs::read(path) {
            Ok(known) if known.trim_ascii() == secret.as_bytes() => return Ok(false),
            Ok(_) => return Err(io::Error::new(io::ErrorKind::AlreadyExists, "it has another secret")),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
        private_file::replace(path, secret.as_bytes())?;
        Ok(true)
    }

    /// Sets the file of the secret.
    pub fn set_secret_file(&mut self, path: PathBuf) {
        self.options.nova.secret = path;
    }
}

/// The local OVSDB as Neutron names it. Its default is a TCP port that hardly any node opens: the socket is there anyway.
fn ovsdb(connection: Option<&str>) -> String {
    match connection {
        None | Some("tcp:127.0.0.1:6640") => DEFAULT_OVSDB.to_owned(),
        Some(connection) => connection.to_owned(),
    }
}

fn is_true(text: &str) -> bool {
    ["true", "1", "yes", "on"].iter().any(|word| text.eq_ignore_ascii_case(word))
}

/// A value without what is as in another one.
fn without(value: &Value, other: &Value) -> Value {
    let Value::Object(members) = value else { return value.clone() };
    let differing = members.iter().filter(|(name, member)| **member != other[*name]);
    let differing: Map<_, _> =
        differing.map(|(name, member)| (name.clone(), without(member, &other[name]))).collect();
    differing.into()
}

/// Parses an ini file as oslo.config does: comments begin with `#` or `;`, a value may go on in indented lines.
fn parse(text: &str) -> BTreeMap<(String, String), String> {
    let (mut values, mut section, mut last) = (BTreeMap::new(), "DEFAULT".to_owned(), None);
    for line in text.lines() {
        let trimmed = line.trim();
        if trimmed.is_empty() || trimmed.starts_with(['#', ';']) {
            last = None;
        } else if let Some(name) = trimmed.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
            (section, last) = (name.to_owned(), None);
        } else if line.starts_with(char::is_whitespace)
            && let Some(value) = last.as_ref().and_then(|key| values.get_mut(key))
        {
            *value = format!("{value}{trimmed}");
        } else if let Some((key, value)) = trimmed.split_once(['=', ':']) {
            let key = (section.clone(), key.trim().to_owned());
            values.insert(key.clone(), value.trim().trim_matches(['"', '\'']).to_owned());
            last = Some(key);
        }
    }
    values
}

#[cfg(test)]
mod tests {
    use super::{DEFAULT_SECRET, InstanceOrigin, NeutronSettings, parse};
    use serde_json::json;
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;

    const OVN: &str = "\
[DEFAULT]
# metadata_proxy_shared_secret = commented
metadata_proxy_shared_secret = s3:cr=t
nova_metadata_host = controller.example
nova_metadata_protocol = https
auth_ca_cert=/etc/ssl/nova.pem
[ovs]
ovsdb_connection = tcp:127.0.0.1:6640
[ovn]
ovn_sb_connection = ssl:10.0.0.1:6642,
    ssl:10.0.0.2:6642
ovn_sb_ca_cert = /etc/ovn/ca.pem
";

    #[test]
    fn the_section_has_what_neutron_has_and_no_secret() {
        let settings = NeutronSettings::of(&parse(OVN), InstanceOrigin::Ovn);
        assert_eq!(
            settings.section(),
            json!({"openstack": {
                "nova": {"url": "https://controller.example:8775", "tls": {"ca": "/etc/ssl/nova.pem"}},
                "southbound": "ssl:10.0.0.1:6642,ssl:10.0.0.2:6642",
                "tls": {"ca": "/etc/ovn/ca.pem"},
            }})
        );
        assert!(settings.remarks().is_empty());
        let without =
            NeutronSettings::of(&parse("[DEFAULT]\nnova_metadata_insecure = True\n"), InstanceOrigin::Ovn);
        assert_eq!(without.section(), json!({"openstack": {}}));
        assert_eq!(without.remarks().len(), 2, "no secret, and no insecure TLS");
    }

    #[test]
    fn the_remark_on_a_missing_secret_names_the_file_of_the_section() {
        for (file, section) in [
            (DEFAULT_SECRET, json!({"openstack": {}})),
            ("/etc/nova/secret", json!({"openstack": {"nova": {"secret": "/etc/nova/secret"}}})),
        ] {
            let mut settings = NeutronSettings::of(&parse("[DEFAULT]\n"), InstanceOrigin::Ovn);
            settings.set_secret_file(file.into());
            assert_eq!(settings.section(), section, "{file}");
            let remarks = settings.remarks();
            assert!(matches!(&remarks[..], [only] if only.ends_with(&format!("to {file}"))), "{remarks:?}");
        }
    }

    #[test]
    fn a_node_without_ovn_has_its_instances_from_libvirt() {
        const METADATA: &str =
            "[DEFAULT]\nnova_metadata_host = controller\nmetadata_proxy_shared_secret = s\n";
        const BRIDGES: &str = "[ovs]\novsdb_connection = tcp:10.0.0.1:6640\n[agent]\ntunnel_types = vxlan\n";
        let room = tempfile::tempdir().expect("a directory");
        for (name, text) in [
            ("metadata_agent.ini", METADATA),
            ("openvswitch_agent.ini", BRIDGES),
            ("linuxbridge_agent.ini", "[linux_bridge]\n"),
            ("ovn_agent.ini", OVN),
            ("with_ovn.ini", "[ovn]\novn_sb_connection = tcp:10.0.0.1:6642\n"),
        ] {
            fs::write(room.path().join(name), text).expect("written");
        }
        for (names, is_libvirt) in [
            (&["metadata_agent.ini", "openvswitch_agent.ini"][..], true),
            (&["metadata_agent.ini", "linuxbridge_agent.ini"], true),
            (&["metadata_agent.ini"], false),
            (&["ovn_agent.ini", "openvswitch_agent.ini"], false),
            (&["with_ovn.ini", "openvswitch_agent.ini"], false),
        ] {
            let files: Vec<_> = names.iter().map(|name| room.path().join(name)).collect();
            let settings = NeutronSettings::read(&files).expect("files");
            let section = settings.section();
            assert_eq!(section["openstack"]["instances"] == "libvirt", is_libvirt, "{names:?}");
            assert_eq!(settings.options.conflict(), None, "{names:?}");
            if is_libvirt {
                let nova = json!({"url": "http://controller:8775"});
                assert_eq!(section, json!({"openstack": {"instances": "libvirt", "nova": nova}}));
            }
        }
    }

    #[test]
    fn the_secret_goes_to_a_private_file_that_is_not_overwritten() {
        let room = tempfile::tempdir().expect("a directory");
        let (ini, file) = (room.path().join("ovn_agent.ini"), room.path().join("secret"));
        fs::write(&ini, OVN).expect("written");
        let settings = NeutronSettings::read(&[ini]).expect("a file");
        assert!(settings.write_secret(&file).expect("written"));
        assert_eq!(fs::read(&file).expect("the secret"), b"s3:cr=t");
        assert_eq!(fs::metadata(&file).expect("a file").permissions().mode() & 0o777, 0o600);
        assert!(!settings.write_secret(&file).expect("it is the same"));
        fs::write(&file, "another").expect("written");
        settings.write_secret(&file).expect_err("it is another");
        assert!(NeutronSettings::read(&[room.path().join("none")]).is_err());
    }
}
