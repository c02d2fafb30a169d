//! Reads the parts of a domain's XML that make up its record.

use metadata_common::mac::Mac;
use metadata_common::port::is_ifname;
use metadata_content::record::values::is_uuid;
use metadata_content::record::{Record, RecordError, RecordLimits, Warning};
use roxmltree::{Document, Node, ParsingOptions};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

use super::{LibvirtError, NAMESPACE, XML_BYTES, XML_NAMESPACES, XML_NODES, instance};
use crate::record_part::{
    DEFAULTS, SmbiosFields, label, merge, name_nics, open_mode, parse_composed, part, stamp, tells_of_network,
};

/// Types of interfaces that have taps (libvirt, docs/formatdomain.rst "Network interfaces").
const TAPS: [&str; 3] = ["network", "bridge", "ethernet"];

/// Prefixes of interface names that libvirt generates at each start (`VIR_NET_GENERATED_VNET_PREFIX` and related
/// in src/util/virnetdev.h). Until a domain runs on this host, such names may belong to other taps.
const GENERATED: [&str; 4] = ["vnet", "macvtap", "macvlan", "vif"];

/// A domain as its XML describes it.
#[derive(Clone, Debug, PartialEq)]
pub struct LibvirtDomain {
    /// The domain's name.
    pub name: String,
    /// Its UUID, in lower case.
    pub uuid: String,
    /// The architecture, in libvirt's spelling.
    pub arch: Option<String>,
    /// The cloud that its firmware names, as a value of `serve.smbios`.
    pub smbios: Option<&'static str>,
    /// The interfaces with taps.
    pub interfaces: Vec<TapInterface>,
    /// The other interfaces, each with the reason.
    pub skipped: Vec<SkippedInterface>,
    /// The part of a record that its metadata contains.
    pub instance: Option<Value>,
}

/// An interface with a tap.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TapInterface {
    /// Its position among all interfaces, from 0.
    pub index: usize,
    /// The guest's MAC.
    pub mac: Mac,
    /// The tap's name, once it is final.
    pub tap: Option<String>,
    /// MTU in bytes, if the domain sets it.
    pub mtu: Option<u32>,
    /// The libvirt network or the bridge.
    pub network: Option<String>,
}

/// An interface that cannot be served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SkippedInterface {
    /// Its MAC, or its position.
    pub interface: String,
    /// The reason.
    pub reason: String,
}

/// Whether the domain's taps have their final names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TapNames {
    /// The taps exist.
    Made,
    /// The taps do not exist yet, so generated names are not valid.
    ToBeMade,
}

impl LibvirtDomain {
    /// Parses the XML that libvirt passes to a hook.
    ///
    /// # Errors
    /// The input is too large, not XML, or not a domain; or our element in the metadata breaks the rules of
    /// [`instance`].
    pub fn parse(bytes: &[u8], taps: TapNames) -> Result<Self, LibvirtError> {
        let document = document(text(bytes)?)?;
        let domain = document.root_element();
        let (name, uuid) = identity(domain)?;
        let (interfaces, skipped) = interfaces(domain, taps);
        Ok(Self {
            name,
            uuid,
            arch: child(domain, "os")
                .and_then(|os| child(os, "type"))
                .and_then(|kind| kind.attribute("arch"))
                .map(str::to_owned),
            smbios: smbios(domain),
            interfaces,
            skipped,
            instance: ours(domain)?.map(instance::read).transpose()?,
        })
    }

    /// The part of a record that the domain alone determines.
    #[must_use]
    pub fn implied(&self) -> Value {
        let nics: Vec<_> = self.interfaces.iter().map(TapInterface::nic).collect();
        let mut record = json!({
            "vm": {
                "name": self.name,
                "project": {"id": "libvirt", "number": 0, "account": "000000000000"},
            },
            "hostname": {"short": label(&self.name)},
            "placement": {"region": "local", "zone": "local-a"},
            "network": {"nics": nics},
        });
        if let Some(arch) = &self.arch {
            record["arch"] = json!(arch);
        }
        if let Some(smbios) = self.smbios {
            record["serve"] = json!({"smbios": smbios});
        }
        record
    }
}

/// Returns the UUID of a domain, even if the rest of its XML is invalid.
///
/// # Errors
/// The input is too large, not XML, or not a domain.
pub fn uuid(bytes: &[u8]) -> Result<String, LibvirtError> {
    Ok(named(bytes)?.1)
}

/// Returns the name and the UUID of a domain, even if the rest of its XML is invalid.
///
/// # Errors
/// Like [`uuid`].
pub fn named(bytes: &[u8]) -> Result<(String, String), LibvirtError> {
    identity(document(text(bytes)?)?.root_element())
}

impl TapInterface {
    fn nic(&self) -> Value {
        let mut nic = json!({"id": format!("n{}", self.index), "mac": self.mac.to_string()});
        let fields = [
            ("port", self.tap.as_ref().map(|tap| json!({"ifname": tap}))),
            ("mtu", self.mtu.map(|mtu| json!(mtu))),
            ("network_id", self.network.as_ref().map(|network| json!(network))),
        ];
        for (field, value) in fields {
            if let Some(value) = value {
                nic[field] = value;
            }
        }
        nic
    }
}

pub(super) fn text(bytes: &[u8]) -> Result<&str, LibvirtError> {
    if bytes.len() > XML_BYTES {
        return Err(xml(format_args!("at most {XML_BYTES} bytes"), "more"));
    }
    std::str::from_utf8(bytes)
        .map_err(|error| xml("UTF-8", format_args!("another byte at {}", error.valid_up_to())))
}

/// Parses without document types, so that only XML's five predefined entities exist.
pub(super) fn document(text: &str) -> Result<Document<'_>, LibvirtError> {
    // The parser copies the namespaces in scope for each element that declares one.
    if text.matches("xmlns").take(XML_NAMESPACES + 1).count() > XML_NAMESPACES {
        return Err(xml(format_args!("at most {XML_NAMESPACES} namespaces"), "more"));
    }
    let options = ParsingOptions { allow_dtd: false, nodes_limit: XML_NODES, ..ParsingOptions::default() };
    Document::parse_with_options(text, options)
        .map_err(|error| xml("a well-formed document without a document type", error))
}

/// The name and the UUID.
pub(super) fn identity(domain: Node<'_, '_>) -> Result<(String, String), LibvirtError> {
    if !domain.has_tag_name("domain") {
        return Err(xml("a <domain>", format_args!("<{}>", shown(domain.tag_name().name()))));
    }
    let name = text_of(domain, "name").ok_or_else(|| xml("a <name> in <domain>", "none"))?;
    let uuid = text_of(domain, "uuid").ok_or_else(|| xml("a <uuid> in <domain>", "none"))?;
    let uuid = uuid.to_ascii_lowercase();
    if !is_uuid(&uuid) {
        return Err(xml("a UUID in <uuid>", shown(&uuid)));
    }
    Ok((name.to_owned(), uuid))
}

/// The interfaces with taps, and the others.
pub(super) fn interfaces(domain: Node<'_, '_>, taps: TapNames) -> (Vec<TapInterface>, Vec<SkippedInterface>) {
    let (mut interfaces, mut skipped) = (Vec::new(), Vec::new());
    let devices = child(domain, "devices");
    let found = devices.iter().flat_map(|devices| children(*devices, "interface"));
    for (index, node) in found.enumerate() {
        match interface(index, node, taps) {
            Ok(interface) => interfaces.push(interface),
            Err(other) => skipped.push(other),
        }
    }
    (interfaces, skipped)
}

fn interface(index: usize, node: Node<'_, '_>, taps: TapNames) -> Result<TapInterface, SkippedInterface> {
    let attribute = |element: &'static str, name| child(node, element)?.attribute(name);
    let address = attribute("mac", "address");
    let skipped = |reason: String| {
        let interface = address.map_or_else(|| format!("interface {index}"), shown);
        SkippedInterface { interface, reason }
    };
    let kind = node.attribute("type").unwrap_or_default();
    if !TAPS.contains(&kind) {
        return Err(skipped(format!("type `{}` has no tap on this host", shown(kind))));
    }
    let mac = address.and_then(|text| text.parse::<Mac>().ok()).filter(|mac| !mac.is_group());
    let Some(mac) = mac else { return Err(skipped("expected the MAC of one station".into())) };
    let named = attribute("target", "dev");
    if let Some(name) = named.filter(|name| !is_ifname(name)) {
        return Err(skipped(format!("expected the name of a tap, found `{}`", shown(name))));
    }
    let is_known =
        |name: &&str| taps == TapNames::Made || !GENERATED.iter().any(|prefix| name.starts_with(prefix));
    Ok(TapInterface {
        index,
        mac,
        tap: named.filter(is_known).map(str::to_owned),
        mtu: attribute("mtu", "size").and_then(|size| size.parse().ok()),
        network: attribute("source", "network").or_else(|| attribute("source", "bridge")).map(str::to_owned),
    })
}

/// The cloud that the firmware names.
fn smbios(domain: Node<'_, '_>) -> Option<&'static str> {
    let tables = children(domain, "sysinfo").find(|node| node.attribute("type") == Some("smbios"))?;
    let entry = |table: &'static str, name: &'static str| {
        let entries = child(tables, table).into_iter().flat_map(|table| children(table, "entry"));
        let mut named = entries.filter(|entry| entry.attribute("name") == Some(name));
        named.next().and_then(|entry| entry.text()).unwrap_or_default().to_owned()
    };
    stamp(&SmbiosFields {
        serial: &entry("system", "serial"),
        manufacturer: &entry("system", "manufacturer"),
        product: &entry("system", "product"),
        asset: &entry("chassis", "asset"),
    })
}

/// Our element in the metadata.
fn ours<'a, 'i>(domain: Node<'a, 'i>) -> Result<Option<Node<'a, 'i>>, LibvirtError> {
    let elements = child(domain, "metadata").into_iter().flat_map(|metadata| metadata.children());
    let mut ours = elements.filter(|node| node.tag_name().namespace() == Some(NAMESPACE));
    let found = ours.next();
    match (found, ours.next()) {
        (Some(node), None) if node.tag_name().name() == "instance" => Ok(Some(node)),
        (None, _) => Ok(None),
        (Some(node), second) => {
            let name = shown(second.unwrap_or(node).tag_name().name());
            Err(instance::wrong(
                second.unwrap_or(node),
                "one <instance> of our namespace",
                format_args!("<{name}>"),
            ))
        }
    }
}

pub(super) fn xml(expected: impl ToString, found: impl ToString) -> LibvirtError {
    LibvirtError::Xml { expected: expected.to_string(), found: found.to_string() }
}

/// The first child of this name; libvirt's own elements have no namespace.
pub(super) fn child<'a, 'i>(node: Node<'a, 'i>, name: &'a str) -> Option<Node<'a, 'i>> {
    node.children().find(|child| child.has_tag_name(name))
}

pub(super) fn children<'a, 'i>(node: Node<'a, 'i>, name: &'a str) -> impl Iterator<Item = Node<'a, 'i>> {
    node.children().filter(move |child| child.has_tag_name(name))
}

fn text_of<'a>(node: Node<'a, '_>, name: &'a str) -> Option<&'a str> {
    child(node, name)?.text().map(str::trim).filter(|text| !text.is_empty())
}

/// The start of a name, as one printable line.
pub(super) fn shown(text: &str) -> String {
    metadata_content::record::values::excerpt(text)
}

// Composes a domain's record from the domain and its files.

/// What makes a domain's record. The parts override each other in this order: the domain's devices, `defaults.yaml`,
/// the domain's metadata, its own file.
pub struct Composition {
    uuid: String,
    implied: Value,
    parts: [Option<Value>; 3],
    names: [Option<String>; 3],
    /// The files that others than their owner and its group may read, and their modes.
    pub exposed: Vec<(PathBuf, u32)>,
}

/// The record of a domain, without its generation; see [`Composition`].
///
/// # Errors
/// Like [`Composition::read`].
pub fn record(domain: &LibvirtDomain, files: &Path, every: bool) -> Result<Option<Value>, LibvirtError> {
    Ok(Composition::read(domain, files, every)?.map(|composition| composition.record()))
}

impl Composition {
    /// Reads the parts. `None` if neither the domain's metadata nor a file asks for a record, unless `every` is set.
    ///
    /// # Errors
    /// A file cannot be read, or is not part of a record. This function does not validate the whole record.
    pub fn read(domain: &LibvirtDomain, files: &Path, every: bool) -> Result<Option<Self>, LibvirtError> {
        let file = format!("{}.yaml", domain.uuid);
        let mut read = Vec::new();
        let own = part(files, &file, |path| read.push(path.to_owned()))?;
        if domain.instance.is_none() && own.is_none() && !every {
            return Ok(None);
        }
        let shown = |name: &str| Some(files.join(name).display().to_string());
        let defaults = part(files, DEFAULTS, |path| read.push(path.to_owned()))?;
        let exposed = read.into_iter().filter_map(|path| open_mode(&path).map(|mode| (path, mode)));
        Ok(Some(Self {
            uuid: domain.uuid.clone(),
            implied: domain.implied(),
            parts: [defaults, domain.instance.clone(), own],
            names: [shown(DEFAULTS), Some("the domain's <metadata>".into()), shown(&file)],
            exposed: exposed.collect(),
        }))
    }

    /// The record, without its generation.
    #[must_use]
    pub fn record(&self) -> Value {
        self.record_without(None)
    }

    fn record_without(&self, without: Option<usize>) -> Value {
        let mut record = self.implied.clone();
        let parts = self.parts.iter().enumerate().filter(|(part, _)| Some(*part) != without);
        for part in parts.filter_map(|(_, part)| part.clone()) {
            merge(&mut record, part);
        }
        // libvirt decides the domain's identity: `null` removes an owner, so that the UUID is the owner.
        merge(&mut record, json!({"schema": "vmrecord/1", "vm": {"uuid": self.uuid, "owner": null}}));
        name_nics(&mut record);
        if !tells_of_network(&record) {
            merge(&mut record, json!({"network": {"mode": "none"}}));
        }
        record
    }

    /// Checks the record of this generation.
    ///
    /// # Errors
    /// The record is invalid; the error names the part that makes it so, if one alone does.
    pub fn check(
        &self,
        limits: &RecordLimits,
        generation: &Value,
    ) -> Result<(Record, Vec<Warning>), RecordError> {
        parse_composed(limits, ("the record", &self.names), |without| {
            let mut record = self.record_without(without);
            record["generation"] = generation.clone();
            record
        })
    }
}
