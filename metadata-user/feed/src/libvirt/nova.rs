//! Reads what OpenStack's Nova and libvirt say of a running domain.
//!
//! libvirt keeps a file of each running domain in [`RUNNING`](super::RUNNING), and replaces it at each change: before
//! QEMU runs the guest, when an interface is plugged or unplugged, and when Nova changes its metadata
//! (`virDomainObjSave` in src/conf/domain_conf.c). No hook runs when an interface is plugged. The file is a
//! `<domstatus>` with the domain in it.
//!
//! Nova's element in the domain's `<metadata>` (`LibvirtConfigGuestMetaNovaInstance` in nova/virt/libvirt/config.py) has
//! texts that tenants choose, such as the instance's name, and names and properties of images. They are escaped, and
//! none is read: only attributes that Nova takes from its own and Neutron's databases.

use roxmltree::Node;
use std::net::IpAddr;

use super::LibvirtError;
use super::domain::{
    TapInterface, TapNames, child, children, document, identity, interfaces, shown, text, xml,
};

/// How the XML namespaces of Nova's metadata begin. The version follows.
const NAMESPACES: &str = "http://openstack.org/xmlns/libvirt/nova/";
/// Most bytes of a project's id (Keystone's column).
const PROJECT_BYTES: usize = 64;

/// A running domain that Nova has made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NovaDomain {
    /// The domain's name, such as `instance-0000002a`.
    pub name: String,
    /// Its UUID, in lower case, which is the instance's.
    pub uuid: String,
    /// The project of the instance.
    pub project: String,
    /// Its ports in Neutron. `None` from Nova before Wallaby (23.0), which did not write them.
    pub ports: Option<Vec<NovaPort>>,
    /// The interfaces with taps.
    pub interfaces: Vec<TapInterface>,
    /// Whether its memory is being sent to another node.
    pub is_leaving: bool,
}

/// A port of an instance, as Nova knows it from Neutron.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NovaPort {
    /// The port's id.
    pub id: String,
    /// Its fixed addresses.
    pub addresses: Vec<IpAddr>,
}

impl NovaDomain {
    /// Reads libvirt's file of a running domain, or the domain alone. `None` if Nova did not make it.
    ///
    /// # Errors
    /// The input is too large, not XML, or not a domain; or Nova's metadata has no project.
    pub fn read(bytes: &[u8]) -> Result<Option<Self>, LibvirtError> {
        let document = document(text(bytes)?)?;
        let root = document.root_element();
        let domain = match root.has_tag_name("domstatus") {
            true => child(root, "domain").ok_or_else(|| xml("a <domain> in <domstatus>", "none"))?,
            false => root,
        };
        let (name, uuid) = identity(domain)?;
        let metadata = child(domain, "metadata").into_iter().flat_map(|metadata| metadata.children());
        let is_nova = |node: &Node<'_, '_>| {
            let is_its = |namespace: &str| namespace.starts_with(NAMESPACES);
            node.tag_name().namespace().is_some_and(is_its) && node.tag_name().name() == "instance"
        };
        let mut found = metadata.filter(is_nova);
        let Some(instance) = found.next() else { return Ok(None) };
        if found.next().is_some() {
            return Err(xml("one <nova:instance> in <metadata>", "two"));
        }
        let ports = only(instance, "ports")?;
        let job = child(root, "job").and_then(|job| job.attribute("async"));
        Ok(Some(Self {
            name,
            uuid,
            project: project(instance)?,
            ports: ports.map(|ports| children(ports, "port").filter_map(port).collect()),
            interfaces: interfaces(domain, TapNames::Made).0,
            is_leaving: job == Some("migration out"),
        }))
    }
}

fn project(instance: Node<'_, '_>) -> Result<String, LibvirtError> {
    let owner = only(instance, "owner")?;
    let project = owner.map(|owner| only(owner, "project")).transpose()?.flatten();
    let id = project.and_then(|project| project.attribute("uuid")).unwrap_or_default();
    let is_good = (1..=PROJECT_BYTES).contains(&id.len()) && id.bytes().all(|byte| byte.is_ascii_graphic());
    is_good
        .then(|| id.to_owned())
        .ok_or_else(|| xml("the id of a project in <nova:owner>", format_args!("`{}`", shown(id))))
}

fn port(node: Node<'_, '_>) -> Option<NovaPort> {
    let is_fixed = |ip: &Node<'_, '_>| ip.attribute("type") == Some("fixed");
    let addresses = children(node, "ip").filter(is_fixed);
    let addresses = addresses.filter_map(|ip| ip.attribute("address")?.parse().ok());
    Some(NovaPort { id: node.attribute("uuid")?.to_ascii_lowercase(), addresses: addresses.collect() })
}

/// The child of this name. Nova writes one of each, so that two may say anything.
fn only<'a, 'i>(node: Node<'a, 'i>, name: &'a str) -> Result<Option<Node<'a, 'i>>, LibvirtError> {
    let mut found = children(node, name);
    match (found.next(), found.next()) {
        (_, Some(_)) => Err(xml(format_args!("one <nova:{name}>"), "two")),
        (first, None) => Ok(first),
    }
}
