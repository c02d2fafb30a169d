//! Values of a record in the forms that several dialects use.

use std::borrow::Cow;
use std::net::IpAddr;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::Value;

use crate::record::network::{Address, AddressMethod, Network};
use crate::record::values::{Cidr, NicMac};
use crate::record::vm::Payload;
use crate::record::{Nic, Record, Role};

/// Returns the NICs that the hypervisor provides, with index and MAC. The guest creates VLANs and bonds itself, and few
/// dialects can describe them.
pub(super) fn given(network: &Network) -> impl Iterator<Item = (usize, &Nic, NicMac)> {
    let nics = network.nics.iter().enumerate();
    nics.filter(move |(_, nic)| nic.is_physical()).filter_map(|(n, nic)| Some((n, nic, nic.mac?)))
}

/// Returns the known addresses of one version, including the expected leases of DHCP.
pub(super) fn known(nic: &Nic, version: IpVersion) -> impl Iterator<Item = (&Address, Cidr)> {
    let known = nic.addresses.iter().filter_map(|address| Some((address, address.address?)));
    known.filter(move |(_, cidr)| IpVersion::of(cidr.address) == version)
}

/// IP version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum IpVersion {
    V4,
    V6,
}

impl IpVersion {
    fn of(address: IpAddr) -> Self {
        if address.is_ipv4() { Self::V4 } else { Self::V6 }
    }

    /// Returns the version of an entry whose address may be unknown.
    pub(super) fn of_entry(entry: &Address) -> Self {
        match (entry.method, entry.address) {
            (AddressMethod::Dhcp4, _) => Self::V4,
            (AddressMethod::Dhcp6 | AddressMethod::Slaac, _) => Self::V6,
            (AddressMethod::Static, cidr) => cidr.map_or(Self::V4, |cidr| Self::of(cidr.address)),
        }
    }
}

/// Returns whether the NIC has addresses of this version, known or not.
pub(super) fn speaks(nic: &Nic, version: IpVersion) -> bool {
    nic.addresses.iter().any(|address| IpVersion::of_entry(address) == version)
}

/// Returns whether the VM has IPv6 addresses only. Its documents then omit all IPv4 members.
pub(super) fn only_ipv6(network: &Network) -> bool {
    let any = |version| network.nics.iter().any(|nic| speaks(nic, version));
    any(IpVersion::V6) && !any(IpVersion::V4)
}

/// Returns the gateway; empty without one.
pub(super) fn gateway(address: &Address) -> String {
    address.gateway.map(|gateway| gateway.to_string()).unwrap_or_default()
}

/// Returns `public` or `private`.
pub(super) fn role_name(role: Role) -> &'static str {
    match role {
        Role::Public => "public",
        Role::Private => "private",
    }
}

/// Returns the resolvers as a list of strings.
pub(super) fn resolvers(network: &Network) -> Value {
    network.dns.iter().map(ToString::to_string).collect()
}

/// Returns the public keys as a list of strings.
pub(super) fn public_keys(record: &Record) -> Value {
    record.ssh_keys.iter().map(|key| key.key.as_str()).collect()
}

/// Returns the public keys, one a line, without a final newline.
pub(super) fn public_key_lines(record: &Record) -> String {
    record.ssh_keys.iter().map(|key| key.key.as_str()).collect::<Vec<_>>().join("\n")
}

/// Returns the labels as a list of strings.
pub(super) fn labels(record: &Record) -> Value {
    record.labels.iter().map(|label| label.as_str()).collect()
}

// Payloads as text, for documents that cannot carry other bytes.

/// First bytes of gzip (RFC 1952 section 2.3.1).
const GZIP: [u8; 2] = [0x1f, 0x8b];

/// Returns a payload as text: UTF-8 unchanged, gzip as a MIME part in base64, which cloud-init unpacks to the same
/// content; `None` for other bytes.
pub(super) fn text_form(bytes: &[u8]) -> Option<Cow<'_, str>> {
    match std::str::from_utf8(bytes) {
        Ok(text) => Some(text.into()),
        Err(_) if bytes.starts_with(&GZIP) => {
            let head =
                "MIME-Version: 1.0\nContent-Type: application/gzip\nContent-Transfer-Encoding: base64\n\n";
            Some(format!("{head}{}\n", STANDARD.encode(bytes)).into())
        }
        Err(_) => None,
    }
}

/// Returns a payload in [`text_form`]; empty text if there is no payload or it has no such form, of which validation
/// warns. Returns `None` until the payload's source has been read.
pub(super) fn payload_text(payload: Option<&Payload>) -> Option<String> {
    let Some(payload) = payload else { return Some(String::new()) };
    let bytes = payload.bytes()?;
    Some(text_form(&bytes).map(Cow::into_owned).unwrap_or_default())
}

/// Returns user-data and vendor-data as [`payload_text`] does; `None` until the sources of both have been read.
pub(super) fn payload_texts(record: &Record) -> Option<(String, String)> {
    payload_text(record.user_data.as_ref()).zip(payload_text(record.vendor_data.as_ref()))
}

#[cfg(test)]
mod tests {
    use super::{payload_text, text_form};
    use crate::record::vm::Payload;
    use bytes::Bytes;

    #[test]
    fn text_stays_gzip_is_wrapped_and_other_bytes_have_no_form() {
        assert_eq!(text_form("#é\n".as_bytes()).as_deref(), Some("#é\n"));
        let wrapped = "MIME-Version: 1.0\nContent-Type: application/gzip\n\
                       Content-Transfer-Encoding: base64\n\nH4sI\n";
        assert_eq!(text_form(&[0x1f, 0x8b, 0x08]).as_deref(), Some(wrapped));
        assert_eq!(text_form(&[0xff, 0xfe]), None);
    }

    #[test]
    fn a_payload_that_is_absent_or_has_no_text_form_is_empty() {
        let payload = |bytes: &'static [u8]| Payload::from(Bytes::from_static(bytes));
        assert_eq!(payload_text(None).as_deref(), Some(""));
        assert_eq!(payload_text(Some(&payload(b"\xff\xfe"))).as_deref(), Some(""));
        assert_eq!(payload_text(Some(&payload(b"#x\n"))).as_deref(), Some("#x\n"));
    }
}
