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
/// The option of the secret, which no message shows.
const SECRET_OPTION: &str = "metadata_proxy_shared_secret";
/// Most bytes of a file. With all comments of Neutron's samples one has 60 KiB.
const FILE_BYTES: usize = 1 << 20;
/// Most bytes that a value has with those of the options that it refers to, each as often as it is referred to: as many
/// as the longest path. Options that refer to each other twice each would otherwise double it with every one.
const EXPANDED_BYTES: usize = 4_096;

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
    /// A file cannot be read, or a value refers to an option that no file has, or is too long with those that it refers
    /// to.
    pub fn read(files: &[PathBuf]) -> io::Result<Self> {
        let mut values = NeutronValues::default();
        for path in files {
            let named =
                |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", path.display()));
            let bytes = private_file::read(path, FILE_BYTES).map_err(named)?;
            let bytes = bytes.ok_or_else(|| named(Errno::NOENT.into()))?;
            values.add(path, &String::from_utf8_lossy(&bytes));
        }
        let names = || files.iter().filter_map(|path| path.file_name()?.to_str());
        // A node that has moved to OVN may still have the files of its former agents.
        let has_ovn = names().any(|name| name.contains("ovn")) || values.has_section("ovn");
        let is_without = !has_ovn && names().any(|name| WITHOUT_OVN.contains(&name));
        let instances = if is_without { InstanceOrigin::Libvirt } else { InstanceOrigin::Ovn };
        Self::of(&values, instances)
    }

    fn of(values: &NeutronValues, instances: InstanceOrigin) -> io::Result<Self> {
        let get = |section, option| values.get(section, option);
        let file = |section, option| Ok::<_, io::Error>(get(section, option)?.map(PathBuf::from));
        let protocol = get("DEFAULT", "nova_metadata_protocol")?.unwrap_or_else(|| "http".into());
        let named_host = get("DEFAULT", "nova_metadata_host")?;
        let host = named_host.as_deref().unwrap_or("127.0.0.1");
        let port = get("DEFAULT", "nova_metadata_port")?.unwrap_or_else(|| "8775".into());
        let host = if host.contains(':') { format!("[{host}]") } else { host.to_owned() };
        let nova = NovaOptions {
            url: format!("{protocol}://{host}:{port}"),
            secret: DEFAULT_SECRET.into(),
            tls: TlsFiles {
                ca: file("DEFAULT", "auth_ca_cert")?,
                certificate: file("DEFAULT", "nova_client_cert")?,
                key: file("DEFAULT", "nova_client_priv_key")?,
            },
        };
        let options = match instances {
            InstanceOrigin::Ovn => OpenstackOptions {
                nova,
                ovsdb: ovsdb(get("ovs", "ovsdb_connection")?),
                southbound: get("ovn", "ovn_sb_connection")?,
                tls: TlsFiles {
                    ca: file("ovn", "ovn_sb_ca_cert")?,
                    certificate: file("ovn", "ovn_sb_certificate")?,
                    key: file("ovn", "ovn_sb_private_key")?,
                },
                ..OpenstackOptions::default()
            },
            InstanceOrigin::Libvirt => OpenstackOptions { nova, instances, ..OpenstackOptions::default() },
        };
        let secret = get("DEFAULT", SECRET_OPTION)?;
        let mut remarks = Vec::new();
        if instances == InstanceOrigin::Libvirt && named_host.is_none() {
            remarks.push(
                "the files have no nova_metadata_host: name the metadata_agent.ini of a network node too, or set \
                 openstack.nova.url"
                    .into(),
            );
        }
        if get("DEFAULT", "nova_metadata_insecure")?.is_some_and(|value| is_true(&value)) {
            remarks.push(
                "nova_metadata_insecure is not taken over: name the authority of Nova's certificate in openstack.nova.tls.ca"
                    .into(),
            );
        }
        Ok(Self { options, secret, remarks })
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
fn ovsdb(connection: Option<String>) -> String {
    connection.filter(|connection| connection != "tcp:127.0.0.1:6640").unwrap_or_else(|| DEFAULT_OVSDB.into())
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

/// A section and an option.
type OptionKey = (String, String);

/// The values of Neutron's files.
#[derive(Default)]
struct NeutronValues(BTreeMap<OptionKey, NeutronValue>);

/// A value as a file has it.
struct NeutronValue {
    text: String,
    file: PathBuf,
}

impl NeutronValues {
    /// Adds the values of a file, which override those of former files.
    fn add(&mut self, file: &Path, text: &str) {
        let values = parse(text).into_iter();
        self.0.extend(values.map(|(key, text)| (key, NeutronValue { text, file: file.to_owned() })));
    }

    fn has_section(&self, section: &str) -> bool {
        self.0.keys().any(|(name, _)| name == section)
    }

    fn find(&self, section: &str, option: &str) -> Option<(&OptionKey, &NeutronValue)> {
        self.0.get_key_value(&(section.to_owned(), option.to_owned()))
    }

    /// The value of an option, with the values of those that it refers to; `None` if it is empty.
    fn get(&self, section: &str, option: &str) -> io::Result<Option<String>> {
        let found = self.find(section, option);
        let mut rest = EXPANDED_BYTES;
        let text = found.map(|found| self.expand(found, &mut Vec::new(), &mut rest)).transpose()?;
        Ok(text.filter(|text| !text.is_empty()))
    }

    /// Puts the values of options in place of `$option`, `${option}` and `$section.option`, as oslo.config does
    /// (`ConfigOpts._substitute`): an option without a section is of the value's own section, or of `DEFAULT`; `$$` and
    /// `\$` are a `$`, and so is one without a name. `trail` has the options that led here. `bytes_left` is what is left
    /// of [`EXPANDED_BYTES`]: each value counts as the file has it, so that references to empty ones count too.
    fn expand<'a>(
        &'a self,
        (key, value): (&'a OptionKey, &'a NeutronValue),
        trail: &mut Vec<&'a OptionKey>,
        bytes_left: &mut usize,
    ) -> io::Result<String> {
        trail.push(key);
        *bytes_left = bytes_left.checked_sub(value.text.len()).ok_or_else(|| too_long(trail, &value.file))?;
        let text = value.text.replace(r"\$", "$$");
        let (mut expanded, mut rest) = (String::new(), &*text);
        while let Some((before, after)) = rest.split_once('$') {
            expanded.push_str(before);
            let Some((name, after_name)) = reference(after) else {
                expanded.push('$');
                rest = after.strip_prefix('$').unwrap_or(after);
                continue;
            };
            let found = match name.split_once('.') {
                Some((section, option)) => self.find(section, option),
                None => self.find(&key.0, name).or_else(|| self.find("DEFAULT", name)),
            };
            let found = match found {
                Some((found, _)) if trail.contains(&found) => Err("that it refers to itself"),
                Some(found) => Ok(found),
                None => Err("none, and Neutron's defaults are not known here"),
            };
            let found = found.map_err(|found| unresolved(trail, &value.file, name, found))?;
            expanded.push_str(&self.expand(found, trail, bytes_left)?);
            rest = after_name;
        }
        trail.pop();
        Ok(expanded + rest)
    }
}

/// The name behind a `$`, which may be in braces, and what follows it (`ConfigOpts.Template` of oslo.config).
fn reference(text: &str) -> Option<(&str, &str)> {
    let braced = text.strip_prefix('{');
    let text = braced.unwrap_or(text);
    let is_of_name = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '.');
    let (name, rest) = text.split_at(text.find(|c: char| !is_of_name(c)).unwrap_or(text.len()));
    let is_name = name.starts_with(|c: char| c == '_' || c.is_ascii_alphabetic());
    let rest = if braced.is_some() { rest.strip_prefix('}')? } else { rest };
    is_name.then_some((name, rest))
}

/// The error of a value that refers to an option without one. `trail` leads from an option that is read to this one.
fn unresolved(trail: &[&OptionKey], file: &Path, name: &str, found: &str) -> io::Error {
    let is_secret = trail.first().is_some_and(|(_, option)| option == SECRET_OPTION);
    let of = trail.last().map(|(section, option)| format!("{option} of [{section}]")).unwrap_or_default();
    // The text after a `$` is part of the secret, so the message does not show it.
    let (name, remedy) = match is_secret {
        true => ("the option behind `$`".to_owned(), "write `$$` for a `$` of the secret"),
        false => (
            format!("`{name}`"),
            "name the file that sets it too, such as neutron.conf, or write the value in its place (`$$` is a `$`)",
        ),
    };
    let file = file.display();
    let text = format!("{file}: {of}: expected a value of {name} in the files, found {found}; {remedy}");
    io::Error::new(io::ErrorKind::InvalidData, text)
}

/// The error of a value that is too long with those that it refers to. `trail` leads from an option that is read to the
/// one in `file` with which it is.
fn too_long(trail: &[&OptionKey], file: &Path) -> io::Error {
    let of = trail.first().map(|(section, option)| format!("{option} of [{section}]")).unwrap_or_default();
    let file = file.display();
    let text = format!(
        "{file}: {of}: expected at most {EXPANDED_BYTES} bytes with the values that it refers to, found more; shorten \
         them"
    );
    io::Error::new(io::ErrorKind::InvalidData, text)
}

/// Parses an ini file as oslo.config does: comments begin with `#` or `;`, a value may go on in indented lines.
fn parse(text: &str) -> BTreeMap<OptionKey, String> {
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
    use super::{DEFAULT_SECRET, EXPANDED_BYTES, InstanceOrigin, NeutronSettings, NeutronValues};
    use serde_json::json;
    use std::os::unix::fs::PermissionsExt as _;
    use std::path::Path;
    use std::{fs, io};

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

    /// The settings of a file `/etc/neutron/a.ini`.
    fn settings(text: &str, instances: InstanceOrigin) -> io::Result<NeutronSettings> {
        let mut values = NeutronValues::default();
        values.add(Path::new("/etc/neutron/a.ini"), text);
        NeutronSettings::of(&values, instances)
    }

    fn with_ovn(text: &str) -> NeutronSettings {
        settings(text, InstanceOrigin::Ovn).expect("settings")
    }

    #[test]
    fn the_section_has_what_neutron_has_and_no_secret() {
        let settings = with_ovn(OVN);
        assert_eq!(
            settings.section(),
            json!({"openstack": {
                "nova": {"url": "https://controller.example:8775", "tls": {"ca": "/etc/ssl/nova.pem"}},
                "southbound": "ssl:10.0.0.1:6642,ssl:10.0.0.2:6642",
                "tls": {"ca": "/etc/ovn/ca.pem"},
            }})
        );
        assert!(settings.remarks().is_empty());
        let without = with_ovn("[DEFAULT]\nnova_metadata_insecure = True\n");
        assert_eq!(without.section(), json!({"openstack": {}}));
        assert_eq!(without.remarks().len(), 2, "no secret, and no insecure TLS");
    }

    #[test]
    fn the_remark_on_a_missing_secret_names_the_file_of_the_section() {
        for (file, section) in [
            (DEFAULT_SECRET, json!({"openstack": {}})),
            ("/etc/nova/secret", json!({"openstack": {"nova": {"secret": "/etc/nova/secret"}}})),
        ] {
            let mut settings = with_ovn("[DEFAULT]\n");
            settings.set_secret_file(file.into());
            assert_eq!(settings.section(), section, "{file}");
            let remarks = settings.remarks();
            assert!(matches!(&remarks[..], [only] if only.ends_with(&format!("to {file}"))), "{remarks:?}");
        }
    }

    #[test]
    fn a_value_has_those_of_the_options_that_it_refers_to() {
        for (text, host) in [
            ("nova_metadata_host = $my_ip\nmy_ip = 10.0.0.5", "10.0.0.5"),
            ("nova_metadata_host = ${my_ip}\nmy_ip = fd00::5", "[fd00::5]"),
            ("nova_metadata_host = nova-${region}.example\nregion = one", "nova-one.example"),
            ("nova_metadata_host = $NET_1.example\n[NET_1]\nexample = a", "a"),
            ("nova_metadata_host = $net.address\n[net]\naddress = 10.0.0.6", "10.0.0.6"),
            (
                "prefix = 1\nnova_metadata_host = ${net.a}\n[net]\na = ${prefix}.example\nprefix = 2",
                "2.example",
            ),
            ("prefix = 1\nnova_metadata_host = ${net.a}\n[net]\na = ${prefix}.example", "1.example"),
            ("nova_metadata_host = $a$b$a\na = 1$b\nb = 2", "12212"),
            ("nova_metadata_host = $empty\nempty =", "127.0.0.1"),
            ("nova_metadata_host = a$$b", "a$b"),
            (r"nova_metadata_host = a\$b", "a$b"),
            ("nova_metadata_host = $$$a\na = 1", "$1"),
            ("nova_metadata_host = a$1${b$", "a$1${b$"),
            ("metadata_proxy_socket = $state_path/socket", "127.0.0.1"),
        ] {
            let url = with_ovn(text).options.nova.url;
            assert_eq!(url, format!("http://{host}:8775"), "{text}");
        }
        let secret = with_ovn("metadata_proxy_shared_secret = a$$b").secret;
        assert_eq!(secret.as_deref(), Some("a$b"));
        let unread = settings("[ovs]\novsdb_connection = tcp:$my_ip:6640", InstanceOrigin::Libvirt);
        assert!(unread.is_ok(), "without OVN nobody reads it");
    }

    #[test]
    fn a_reference_without_a_value_is_refused_with_its_place_and_the_remedy() {
        for (text, words) in [
            ("nova_metadata_host = $my_ip", ["nova_metadata_host of [DEFAULT]", "`my_ip`", "neutron.conf"]),
            (
                "[ovn]\novn_sb_connection = tcp:${my_ip}:6642",
                ["ovn_sb_connection of [ovn]", "`my_ip`", "`$$`"],
            ),
            ("nova_metadata_host = $net.a\n[net]\na = $b.c", ["a of [net]", "`b.c`", "found none"]),
            ("nova_metadata_host = $a\na = $b\nb = $a", ["b of [DEFAULT]", "`a`", "refers to itself"]),
            ("metadata_proxy_shared_secret = a$key", ["secret of [DEFAULT]", "behind `$`", "write `$$`"]),
            ("metadata_proxy_shared_secret = $a\na = $key", ["a of [DEFAULT]", "behind `$`", "write `$$`"]),
        ] {
            let error = settings(text, InstanceOrigin::Ovn).err().expect(text).to_string();
            assert!(error.starts_with("/etc/neutron/a.ini: "), "{error}");
            assert!(words.iter().all(|word| error.contains(word)), "{text}: {error}");
            assert!(!error.contains("key"), "a part of the secret: {error}");
        }
    }

    #[test]
    fn a_value_that_grows_beyond_its_bytes_by_references_is_refused() {
        // Each option has the next one twice: 40 of them would make 2^40 values, whether the last has a byte or none.
        let doubling = |last: &str| {
            let options = (0..40).map(|n| format!("o{n} = $o{0}$o{0}\n", n + 1)).collect::<String>();
            format!("nova_metadata_host = $o0\n{options}o40 = {last}\n")
        };
        let chain = (0..2_000).map(|n| format!("o{n} = $o{}\n", n + 1)).collect::<String>();
        let long = |bytes| format!("nova_metadata_host = $o\no = {}\n", "a".repeat(bytes));
        let fits = EXPANDED_BYTES - "$o".len();
        for text in [
            doubling("a"),
            doubling(""),
            format!("nova_metadata_host = $o0\n{chain}o2000 = a\n"),
            long(fits + 1),
        ] {
            let error = settings(&text, InstanceOrigin::Ovn).err().expect("too long").to_string();
            assert_eq!(
                error,
                "/etc/neutron/a.ini: nova_metadata_host of [DEFAULT]: expected at most 4096 bytes with the values that \
                 it refers to, found more; shorten them"
            );
        }
        assert!(with_ovn(&long(fits)).options.nova.url.len() > fits);
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
