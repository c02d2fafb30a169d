//! The feed of libvirt: one record for each domain, written by libvirt's hook.
//!
//! libvirt runs the scripts in `/etc/libvirt/hooks/qemu.d/` when a domain starts, stops or migrates, and passes the
//! domain's XML on standard input (libvirt, docs/hooks.rst). `xdp-imds libvirt-hook` is one of these scripts. It writes
//! or removes the domain's record in `hook.d` below the agent's run directory. The agent watches `hook.d` like any
//! directory of records. The hook never calls libvirt, because libvirt waits for the hook: a call would
//! deadlock.
//!
//! A record has four sources; each overrides those before it:
//!
//! 1. the domain: name, UUID, architecture, NICs and their taps;
//! 2. `defaults.yaml` in the directory of files, for all domains of the host;
//! 3. the domain's `<metadata>`: an element `instance` of [`NAMESPACE`] ([`instance`] has its form);
//! 4. `<uuid>.yaml` in the directory of files.
//!
//! The files hold parts of a record ([`crate::record_part`]): mappings merge, lists and payloads replace, `null` removes a
//! value, and MAC or id identify a NIC. A domain with neither 3 nor 4 gets no record.

pub mod domain;
pub mod hook;
pub mod instance;
pub mod nova;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::publisher::Publisher;
use crate::record_part::PartError;
use crate::source::{Source, SourceContext, SourceTask};
use crate::{FeedError, directory};
use metadata_content::record::{RecordError, RecordLimits};
use metadata_content::source::RecordSource;

/// The XML namespace of our element in a domain's `<metadata>`.
pub const NAMESPACE: &str = "https://xdp-imds.dev/libvirt/1";

/// The directory of records below the run directory.
pub const DIRECTORY: &str = "hook.d";

/// Where the packages install the hook's script.
pub const HOOK: &str = "/etc/libvirt/hooks/qemu.d/xdp-imds";
/// The directory of QEMU's hooks.
pub const HOOKS: &str = "/etc/libvirt/hooks/qemu.d";

/// Default directory of files with parts of records.
pub const DEFAULT_FILES: &str = "/etc/xdp-imds/libvirt";

/// Where libvirt keeps what it knows of each running domain of QEMU (`stateDir` in src/qemu/qemu_conf.c).
pub const RUNNING: &str = "/run/libvirt/qemu";

/// Most bytes of a domain's XML. libvirt's protocol carries 4 MiB (REMOTE_STRING_MAX in src/remote/remote_protocol.x),
/// and libvirt then formats the XML again.
pub const XML_BYTES: usize = 8 << 20;

/// Most elements, texts and comments in the XML; a domain with hundreds of devices has about ten thousand.
pub const XML_NODES: u32 = 1 << 18;

/// Most mentions of `xmlns` in the XML; libvirt's own documents have fewer than ten.
pub const XML_NAMESPACES: usize = 256;

/// How an operator changes the metadata of a running domain, as every message and page says it. `virsh edit` changes
/// only what the domain has from its next start on, and `virsh metadata --edit` refuses to change both at once.
#[must_use]
pub fn remedy(domain: &str) -> String {
    format!(
        "change a running domain with `virsh metadata {domain} {NAMESPACE} --key imds --live --edit` (`virsh edit` \
         changes only its next start), or the file; then run `{}`",
        rerun(domain)
    )
}

/// The command that has the hook read the metadata of a running domain and its files again.
#[must_use]
pub fn rerun(domain: &str) -> String {
    format!("virsh dumpxml {domain} | {HOOK} {domain} reconnect begin -")
}

/// Why a domain gets no record.
#[derive(Clone, Debug, thiserror::Error)]
pub enum LibvirtError {
    /// The XML differs from libvirt's format.
    #[error("the domain's XML: expected {expected}, found {found}")]
    Xml {
        /// What was expected.
        expected: String,
        /// What the XML contains instead.
        found: String,
    },
    /// Our element in the domain's metadata is invalid.
    #[error("<metadata> of the domain, line {line}: expected {expected}, found {found}")]
    Instance {
        /// The line in libvirt's formatting of the XML.
        line: u32,
        /// What was expected.
        expected: String,
        /// What the element contains instead.
        found: String,
    },
    /// A file with a part of a record is invalid.
    #[error(transparent)]
    Part(#[from] PartError),
    /// A file cannot be read or written.
    #[error("{}: expected {expected}: {error}", path.display())]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// What the hook needs from it.
        expected: &'static str,
        /// The kernel's error.
        error: Arc<io::Error>,
    },
    /// The assembled record is invalid.
    #[error(transparent)]
    Record(#[from] RecordError),
}

/// An I/O error with its path and the hook's expectation.
fn io_error(path: &Path, expected: &'static str, error: io::Error) -> LibvirtError {
    LibvirtError::Io { path: path.to_owned(), expected, error: error.into() }
}

/// The records that libvirt's hook writes into a directory.
pub struct HookDirectory(PathBuf);

impl HookDirectory {
    /// The directory below a run directory.
    #[must_use]
    pub fn of(run: &Path) -> Self {
        Self(run.join(DIRECTORY))
    }
}

impl Source for HookDirectory {
    fn kind(&self) -> RecordSource {
        RecordSource::Hook
    }

    fn run(&self, context: SourceContext, publisher: Publisher) -> SourceTask {
        Box::pin(watch(self.0.clone(), context.limits, publisher))
    }

    fn is_reread(&self) -> bool {
        true
    }
}

/// Watches the hook's records like [`directory::watch`], and what it refused. A record's key is its domain's UUID.
///
/// # Errors
/// The errors of [`directory::watch`].
pub async fn watch(dir: PathBuf, limits: RecordLimits, tx: impl Into<Publisher>) -> Result<(), FeedError> {
    directory::watch_with_refusals(dir, limits, tx.into().named(uuid)).await
}

/// A file's name without its extension.
fn uuid(name: String) -> String {
    name.rsplit_once('.').map_or(name.clone(), |(uuid, _)| uuid.to_owned())
}

#[cfg(test)]
mod tests {
    use metadata_content::record::{Record, RecordLimits};
    use serde_json::{Value, json};
    use std::fs;
    use std::path::Path;
    use std::time::Duration;
    use tokio::sync::mpsc;
    use tokio::time::timeout;

    use super::domain::{LibvirtDomain, TapNames, uuid};
    use super::{NAMESPACE, XML_BYTES, domain, watch};
    use crate::FeedEvent;
    use crate::directory::{REFUSAL, REFUSAL_BYTES};
    use crate::record_part::{DEFAULTS, FILE_BYTES};

    const UUID: &str = "7c0f1a52-3b5e-4d1a-9d2c-0f5e8a1b2c3d";
    const NIC: &str = "<interface type='bridge'><mac address='52:54:00:00:00:01'/><source bridge='br0'/>\
                   <target dev='vnet7'/></interface>";

    /// A domain's XML with these elements in its metadata and devices.
    fn domain(metadata: &str, devices: &str) -> String {
        format!(
            "<domain type='kvm' id='3'><name>web</name><uuid>{UUID}</uuid><metadata>{metadata}</metadata>\
         <os><type arch='x86_64'>hvm</type></os><devices>{devices}</devices></domain>"
        )
    }

    /// Our element with these children.
    fn ours(children: &str) -> String {
        format!("<i:instance xmlns:i='{NAMESPACE}'>{children}</i:instance>")
    }

    fn parse(xml: &str) -> Result<LibvirtDomain, String> {
        LibvirtDomain::parse(xml.as_bytes(), TapNames::Made).map_err(|error| error.to_string())
    }

    fn instance(children: &str) -> Result<Value, String> {
        parse(&domain(&ours(children), "")).map(|domain| domain.instance.expect("our element"))
    }

    /// The complete record of a domain and its files.
    fn record(xml: &str, files: &Path) -> Record {
        let domain = parse(xml).expect("a domain");
        let mut value =
            domain::record(&domain, files, false).expect("composed").expect("a record is asked for");
        value["generation"] = json!(1);
        Record::parse_within(&RecordLimits::DEFAULT, "record.json", &value.to_string()).expect("a record").0
    }

    #[test]
    fn the_documented_domain_gives_the_documented_record() {
        let none = tempfile::tempdir().expect("a directory");
        let record = record(include_str!("../../../deploy/libvirt/domain.xml"), none.path());
        let expected = json!({
            "schema": "vmrecord/1",
            "generation": 1,
            "vm": {"uuid": UUID, "name": "web-1", "namespace": "shop", "instance_id": "web-1-2026",
                   "project": {"id": "shop", "number": 7, "account": "123456789012"}},
            "hostname": {"short": "web-1", "domain": "example.internal"},
            "placement": {"region": "eu", "zone": "eu-a", "host": "node-1", "fault_domain": "0"},
            "instance_type": "std.small",
            "arch": "x86_64",
            "image": {"id": "ami-00000001", "name": "Debian 12"},
            "admin": {"user": "debian"},
            "ssh_keys": [
                {"name": "default", "user": "debian",
                 "key": "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ8wUQ0H0m1c3a0nYf1mVYQx0b7m2wq8q0R4T0qX9V1k alice@example"},
                {"name": "key-1", "user": "debian",
                 "key": "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ8wUQ0H0m1c3a0nYf1mVYQx0b7m2wq8q0R4T0qX9V1l bob@example"},
            ],
            "user_data": {"text": "#cloud-config\nruncmd:\n- [sh, -c, \"echo a < b && touch /run/done\"]\n"},
            "vendor_data": {"base64": "I2Nsb3VkLWNvbmZpZwp7fQo="},
            "network": {"nics": [{
                "id": "n0", "name": "eth0", "mac": "52:54:00:12:34:56", "mtu": 1500, "network_id": "default",
                "port": {"ifname": "vnet3"},
                "addresses": [{"method": "dhcp4"},
                              {"method": "static", "address": "2001:db8::5/64", "gateway": "2001:db8::1"}],
            }]},
            "metadata": {"role": "web", "tier": "front"},
            "labels": ["blue"],
            "serve": {"smbios": "nocloud", "imdsv2": "required", "dialects": ["ec2"]},
        });
        let expected = Record::parse("expected.json", &expected.to_string()).expect("a record").0;
        assert_eq!(record, expected);
    }

    #[test]
    fn interfaces_with_taps_are_served_and_others_are_reported() {
        let mac = "<mac address='52:54:00:00:00:02'/>";
        let tap = format!("{mac}<target dev='t0'/>");
        let cases = [
            ("network", &tap, Ok(Some("t0"))),
            ("bridge", &tap, Ok(Some("t0"))),
            ("ethernet", &tap, Ok(Some("t0"))),
            ("ethernet", &mac.to_owned(), Ok(None)),
            ("hostdev", &tap, Err("type `hostdev`")),
            ("vhostuser", &tap, Err("type `vhostuser`")),
            ("user", &tap, Err("type `user`")),
            ("direct", &tap, Err("type `direct`")),
            ("vdpa", &tap, Err("type `vdpa`")),
            ("", &tap, Err("type ``")),
            ("bridge", &"<target dev='t0'/>".to_owned(), Err("MAC of one station")),
            ("bridge", &"<mac address='ff:ff:ff:ff:ff:ff'/>".to_owned(), Err("MAC of one station")),
            ("bridge", &format!("{mac}<target dev='../../etc'/>"), Err("name of a tap")),
        ];
        for (kind, inner, expected) in cases {
            let domain = parse(&domain("", &format!("<interface type='{kind}'>{inner}</interface>")))
                .expect("a domain");
            match expected {
                Ok(name) => {
                    let [served] = &domain.interfaces[..] else { panic!("{kind} {inner}: {domain:?}") };
                    assert_eq!(served.tap.as_deref(), name, "{kind} {inner}");
                }
                Err(reason) => {
                    let [skipped] = &domain.skipped[..] else { panic!("{kind} {inner}: {domain:?}") };
                    assert!(skipped.reason.contains(reason), "{kind} {inner}: {skipped:?}");
                }
            }
        }
    }

    #[test]
    fn generated_tap_names_are_ignored_until_the_taps_exist() {
        let cases =
            [("vnet7", None), ("macvtap0", None), ("tap-web", Some("tap-web")), ("my-vnet", Some("my-vnet"))];
        for (name, known) in cases {
            let xml = domain("", &NIC.replace("vnet7", name));
            for (taps, expected) in [(TapNames::Made, Some(name)), (TapNames::ToBeMade, known)] {
                let domain = LibvirtDomain::parse(xml.as_bytes(), taps).expect("a domain");
                assert_eq!(domain.interfaces[0].tap.as_deref(), expected, "{name} {taps:?}");
            }
        }
    }

    #[test]
    fn a_host_name_is_made_of_any_name_of_a_domain() {
        let long = "x".repeat(80);
        let cases = [
            ("web-1", "web-1"),
            ("Web_1.example.org", "web-1"),
            ("--müller GmbH--", "m-ller-gmbh"),
            ("日本", "vm"),
            (&long, &long[..63]),
        ];
        let none = tempfile::tempdir().expect("a directory");
        for (name, expected) in cases {
            let xml = domain(&ours(""), NIC).replace("<name>web<", &format!("<name>{name}<"));
            assert_eq!(record(&xml, none.path()).hostname.short.as_str(), expected, "{name}");
        }
    }

    #[test]
    fn children_without_a_namespace_are_read_as_virsh_sets_them() {
        let xml = format!(
            "<i:instance xmlns:i='{NAMESPACE}'><hostname>a.b</hostname><meta key='k'>v</meta></i:instance>"
        );
        let read = parse(&domain(&xml, "")).expect("a domain").instance.expect("our element");
        assert_eq!(read, json!({"hostname": {"short": "a", "domain": "b"}, "metadata": {"k": "v"}}));
    }

    #[test]
    fn metadata_in_other_namespaces_is_ignored() {
        for metadata in ["", "<x:instance xmlns:x='http://example.org/'/>", "<instance/>"] {
            assert_eq!(parse(&domain(metadata, "")).expect("a domain").instance, None, "{metadata}");
        }
    }

    #[test]
    fn payloads_keep_their_text_and_lose_only_the_layout() {
        let cases = [
            ("#cloud-config\na: 1\n", "#cloud-config\na: 1\n"),
            ("\n#cloud-config\na: 1\n      ", "#cloud-config\na: 1\n"),
            ("  \n\n#!/bin/sh\n", "\n#!/bin/sh\n"),
            ("<![CDATA[\n#!/bin/sh\ntest 1 < 2\n]]>", "#!/bin/sh\ntest 1 < 2\n"),
            ("a ]]&gt; <![CDATA[b < c]]> &amp; d", "a ]]> b < c & d"),
            ("&#9;x", "\tx"),
            ("", ""),
        ];
        for (inner, expected) in cases {
            let read = instance(&format!("<i:user-data>{inner}</i:user-data>")).expect(inner);
            assert_eq!(read["user_data"], json!({"text": expected}), "{inner}");
        }
    }

    #[test]
    fn invalid_content_of_our_element_is_refused_with_its_line() {
        let cases = [
            ("<i:userdata>x</i:userdata>", "<userdata>"),
            ("<i:hostname>a</i:hostname><i:hostname>b</i:hostname>", "one <hostname>"),
            ("<i:hostname fqdn='x'>a</i:hostname>", "`fqdn`"),
            ("<i:project id='a' numbr='7'/>", "`numbr`"),
            ("<i:project number='x'/>", "a number"),
            ("<i:user-data><b>x</b></i:user-data>", "`&lt;`"),
            ("<i:user-data>a<!-- -->b</i:user-data>", "without comments"),
            ("<i:user-data encoding='gzip'>x</i:user-data>", "`gzip`"),
            ("<i:user-data encoding='base64'>sesame!</i:user-data>", "RFC 4648"),
            ("<i:meta>x</i:meta>", "attribute `key`"),
            ("<i:meta key='a'>x</i:meta><i:meta key='a'>y</i:meta>", "`a` twice"),
            ("<i:address method='dhcp4'/>", "attribute `mac`"),
            ("<i:record>[sesame]</i:record>", "a mapping"),
            ("<i:record>user_data: {text: 'sesame}</i:record>", "a syntax error"),
            ("<i:record>user_data: {source: {file: other}}</i:record>", "`source`"),
            ("<x:hostname xmlns:x='http://example.org/'>a</x:hostname>", "of another"),
        ];
        for (children, expected) in cases {
            let error = instance(&format!("\n\n{children}")).expect_err(children);
            assert!(error.contains(expected), "{children}: {error}");
            assert!(error.contains("line 3"), "{children}: {error}");
            assert!(!error.contains("sesame"), "a secret is in: {error}");
        }
        let twice = format!("{}{}", ours(""), ours(""));
        assert!(parse(&domain(&twice, "")).expect_err("two").contains("one <instance>"));
    }

    #[test]
    fn hostile_xml_is_refused_in_bounded_time_and_without_a_panic() {
        let bomb = "<!DOCTYPE d [<!ENTITY a 'aaaaaaaaaa'><!ENTITY b '&a;&a;&a;&a;&a;'>]><domain>&b;</domain>";
        let outside = "<!DOCTYPE d [<!ENTITY a SYSTEM 'file:///etc/shadow'>]><domain>&a;</domain>";
        let many = format!("<domain>{}</domain>", "<a/>".repeat(1 << 20));
        let deep = format!("{}{}", "<a>".repeat(1 << 20), "</a>".repeat(1 << 20));
        let attributes: String = (0..20_000).map(|n| format!(" a{n}='{n}'")).collect();
        let huge = vec![b' '; XML_BYTES + 1];
        let crowd = domain(&ours(&"<i:label>x</i:label>".repeat(1_025)), "");
        let cases: [(&str, &[u8]); 14] = [
            ("bomb", bomb.as_bytes()),
            ("outside", outside.as_bytes()),
            ("many", many.as_bytes()),
            ("deep", deep.as_bytes()),
            ("attributes", format!("<domain{attributes}/>").leak().as_bytes()),
            ("huge", &huge),
            ("crowd", crowd.as_bytes()),
            ("empty", b""),
            ("half", b"<domain><name>web</na"),
            ("Latin-1", b"<domain><name>w\xe9b</name></domain>"),
            ("UTF-16", b"\xff\xfe<\0d\0"),
            ("NUL", b"<domain>\0</domain>"),
            ("no uuid", b"<domain><name>web</name></domain>"),
            (
                "bad uuid",
                b"<domain><name>web</name><uuid>../../../../../../etc/passwd-0000000000</uuid></domain>",
            ),
        ];
        for (name, bytes) in cases {
            let error = LibvirtDomain::parse(bytes, TapNames::Made).expect_err(name).to_string();
            assert!(error.len() < 400 && !error.contains('\n'), "{name}: {error}");
        }
        assert!(uuid(bomb.as_bytes()).is_err());
    }

    #[test]
    fn a_broken_element_of_ours_does_not_hide_the_domains_uuid() {
        let xml = domain(&ours("<i:nonsense/>"), "");
        assert!(parse(&xml).is_err());
        assert_eq!(uuid(xml.as_bytes()).expect("a domain"), UUID);
    }

    #[test]
    fn defaults_go_below_the_metadata_and_the_domains_file_above() {
        let room = tempfile::tempdir().expect("a directory");
        let xml = domain(
            &ours(&format!("<i:instance-type>{}</i:instance-type><i:meta key='from'>xml</i:meta>", "xml")),
            NIC,
        );
        let defaults = "instance_type: defaults\nplacement: {region: eu}\nmetadata: {from: defaults, zone: here}\n\
                    vendor_data: {source: {file: common}}\n";
        fs::write(room.path().join(DEFAULTS), defaults).expect("written");
        fs::write(room.path().join("common"), "#cloud-config\n{}\n").expect("written");
        let own = "metadata: {from: file, zone: null}\nvm: {uuid: 00000000-0000-0000-0000-000000000000}\n\
               network:\n  nics:\n  - {mac: '52:54:00:00:00:01', addresses: [{method: dhcp4}]}\n  \
               - {vlan: {link: n0, id: 7}}\n";
        fs::write(room.path().join(format!("{UUID}.yaml")), own).expect("written");

        let record = record(&xml, room.path());
        assert_eq!(record.instance_type(), "xml", "the metadata is over the defaults");
        assert_eq!(record.metadata.0.iter().collect::<Vec<_>>(), [(&"from".to_owned(), &"file".to_owned())]);
        assert_eq!((record.placement.region.as_str(), record.placement.zone.as_str()), ("eu", "local-a"));
        assert_eq!(record.vm.uuid.as_str(), UUID, "no file changes the domain's UUID");
        let vendor = record.vendor_data.as_ref().and_then(|payload| payload.bytes());
        assert_eq!(vendor.as_deref(), Some(&b"#cloud-config\n{}\n"[..]));
        let [nic, vlan] = &record.network.nics[..] else { panic!("{:?}", record.network) };
        assert_eq!((nic.id.as_str(), nic.addresses.len()), ("n0", 1));
        assert!(nic.port.as_ref().is_some_and(|port| port.ifname.as_str() == "vnet7"));
        assert_eq!((vlan.id.as_str(), vlan.vlan.is_some()), ("other1", true));
    }

    #[test]
    fn a_payload_of_a_file_replaces_that_of_the_metadata_whole() {
        let room = tempfile::tempdir().expect("a directory");
        fs::write(room.path().join(format!("{UUID}.yaml")), "user_data: {base64: eHk=}\n").expect("written");
        let record = record(&domain(&ours("<i:user-data>text</i:user-data>"), NIC), room.path());
        assert_eq!(record.user_data.and_then(|payload| payload.bytes()).as_deref(), Some(&b"xy"[..]));
    }

    #[test]
    fn a_domain_without_metadata_or_file_has_a_record_only_on_request() {
        let room = tempfile::tempdir().expect("a directory");
        fs::write(room.path().join(DEFAULTS), "instance_type: small\n").expect("written");
        let domain = parse(&domain("", NIC)).expect("a domain");
        let asked = |every| domain::record(&domain, room.path(), every).expect("composed");
        assert_eq!(asked(false), None);
        assert_eq!(asked(true).expect("a record")["instance_type"], "small");
        fs::write(room.path().join(format!("{UUID}.yaml")), "# nothing to add\n").expect("written");
        assert!(asked(false).is_some(), "an empty file asks for a record");
    }

    #[test]
    fn guests_without_configured_addresses_keep_their_own_defaults() {
        let none = tempfile::tempdir().expect("a directory");
        let address = "<i:address mac='52:54:00:00:00:01'/>";
        let raw = "<i:network-config>version: 2</i:network-config>";
        for (children, mode) in [("", "none"), (address, "auto"), (raw, "raw")] {
            let record = record(&domain(&ours(children), NIC), none.path());
            assert_eq!(serde_json::to_value(record.network.mode).expect("a word"), mode, "{children}");
        }
    }

    #[test]
    fn the_error_of_an_invalid_file_names_the_file_and_the_reason() {
        let huge = "x".repeat(FILE_BYTES + 1);
        let cases = [
            ("- sesame\n", "expected a mapping"),
            (
                "user_data: {text: 'sesame\n",
                "expected a mapping in YAML, found a syntax error at its line 1: ",
            ),
            ("placement: {region: sesame", "line 1: unclosed bracket '{'"),
            ("a: sesame\n b: [sesame\n", "a syntax error at its line 2: "),
            ("user_data: {source: {file: /etc/hostname}}\n", "inside the directory"),
            ("user_data: {source: {file: absent}}\n", "named by `source`"),
            ("user_data: {source: {file: .}}\n", "not a regular file"),
            (&huge, "at most 4 MiB"),
        ];
        let domain = parse(&domain(&ours(""), NIC)).expect("a domain");
        for (text, expected) in cases {
            let room = tempfile::tempdir().expect("a directory");
            fs::write(room.path().join(format!("{UUID}.yaml")), text).expect("written");
            let error = domain::record(&domain, room.path(), false).expect_err(expected).to_string();
            assert!(error.contains(expected) && !error.contains("sesame"), "{error}");
        }
    }

    #[test]
    fn a_warning_about_a_nic_names_it_and_no_place_in_a_text_that_nobody_wrote() {
        let room = tempfile::tempdir().expect("a directory");
        let domain = parse(&domain(&ours("<i:address mac='52:54:00:00:00:01'/>"), NIC)).expect("a domain");
        let composition =
            domain::Composition::read(&domain, room.path(), false).expect("read").expect("asked for");
        let (_, warnings) = composition.check(&RecordLimits::DEFAULT, &1.into()).expect("valid");
        let [warning] = &warnings[..] else { panic!("{warnings:?}") };
        let warning = warning.to_string();
        assert!(warning.starts_with("the record, NIC n0: network.nics[0]: no `name`: "), "{warning}");
        assert!(warning.contains("; add `name: eth0`"), "{warning}");
    }

    #[test]
    fn the_error_of_an_invalid_record_names_the_part_that_makes_it_so() {
        let wrong = "placement: {region: [5]}\n";
        let ours = ours("<i:hostname>web</i:hostname>");
        let own = format!("{UUID}.yaml");
        for (file, text) in [(DEFAULTS, wrong), (own.as_str(), "no_such_field: 1\n")] {
            let room = tempfile::tempdir().expect("a directory");
            fs::write(room.path().join(file), text).expect("written");
            let domain = parse(&domain(&ours, NIC)).expect("a domain");
            let composition =
                domain::Composition::read(&domain, room.path(), false).expect("read").expect("asked for");
            let error = composition.check(&RecordLimits::DEFAULT, &1.into()).expect_err(file).to_string();
            let shown = room.path().join(file).display().to_string();
            assert!(error.starts_with(&format!("{shown}: ")) && !error.contains(":1:"), "{error}");
        }
    }

    // The records that the hook writes, as the agent reads them.

    const LONG: Duration = Duration::from_secs(5);

    #[tokio::test]
    async fn records_have_their_domains_uuid_as_key() {
        let room = tempfile::tempdir().expect("a directory");
        let uuid = "7c0f1a52-3b5e-4d1a-9d2c-0f5e8a1b2c3d";
        let path = room.path().join(format!("{uuid}.json"));
        fs::write(&path, "{}").expect("written");
        let (tx, mut events) = mpsc::channel(8);
        let watching = tokio::spawn(watch(room.path().to_owned(), RecordLimits::DEFAULT, tx));
        let mut next = async || timeout(LONG, events.recv()).await.expect("in time").expect("an event");
        let refused = next().await;
        assert!(matches!(&refused, FeedEvent::Rejected { key, .. } if key == uuid), "{refused:?}");
        assert!(matches!(next().await, FeedEvent::Synced));
        fs::remove_file(&path).expect("removed");
        let removed = next().await;
        assert!(matches!(&removed, FeedEvent::Remove { key } if key == uuid), "{removed:?}");
        // What the hook refused: without a record, of a good record, of a record that becomes good, and no longer.
        let good = include_str!("../../../tests/vectors/record.yaml");
        let refusal = path.with_extension(REFUSAL);
        let good = serde_yaml::from_str::<Value>(good).expect("YAML").to_string();
        let refused = |next: FeedEvent, reason: &str| {
            let FeedEvent::Rejected { key, error } = next else { panic!("{next:?}") };
            assert_eq!((key.as_str(), error.to_string().as_str()), (uuid, reason));
        };
        fs::write(&refusal, "domain web: first\n").expect("written");
        assert!(matches!(next().await, FeedEvent::Remove { .. }));
        refused(next().await, "domain web: first");
        fs::write(&path, &good).expect("written");
        assert!(matches!(next().await, FeedEvent::Upsert { .. }), "the record is good");
        refused(next().await, "domain web: first");
        fs::write(&refusal, "x".repeat(3 * REFUSAL_BYTES)).expect("written");
        assert!(matches!(next().await, FeedEvent::Upsert { .. }));
        refused(next().await, &"x".repeat(REFUSAL_BYTES));
        fs::remove_file(&refusal).expect("removed");
        let again = next().await;
        assert!(
            matches!(&again, FeedEvent::Upsert { key, .. } if key == uuid),
            "nothing is refused: {again:?}"
        );
        // No other file of that ending is read.
        fs::write(room.path().join("web.refused"), "no").expect("written");
        fs::remove_file(&path).expect("removed");
        assert!(matches!(next().await, FeedEvent::Remove { .. }));
        drop(events);
        timeout(LONG, watching).await.expect("in time").expect("no panic").expect("a good end");
    }
}
