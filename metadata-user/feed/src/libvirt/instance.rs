//! Our element in a domain's `<metadata>`, and the record fields it sets.
//!
//! ```xml
//! <metadata>
//!   <imds:instance xmlns:imds="https://xdp-imds.dev/libvirt/1">
//!     <imds:hostname>web-1.example.internal</imds:hostname>
//!     <imds:ssh-key user="debian">ssh-ed25519 AAAA… alice@example</imds:ssh-key>
//!     <imds:user-data>
//! #cloud-config
//! packages: [nginx]
//! </imds:user-data>
//!   </imds:instance>
//! </metadata>
//! ```
//!
//! | element | attributes | text | field of the record |
//! |---|---|---|---|
//! | `hostname` | – | host name, with or without domain | `hostname` |
//! | `instance-id` | – | text | `vm.instance_id` |
//! | `namespace` | – | text | `vm.namespace` |
//! | `project` | `id`, `number`, `account` | – | `vm.project` |
//! | `placement` | `region`, `zone`, `host`, `fault-domain` | – | `placement` |
//! | `instance-type` | – | text | `instance_type` |
//! | `image` | `id`, `name`, `publisher`, `offer`, `sku`, `version` | – | `image` |
//! | `ssh-key`* | `name`, `user` | public keys, one a line; `#` begins a comment | `ssh_keys` |
//! | `user-data`, `vendor-data` | `encoding="base64"` | payload | `user_data`, `vendor_data` |
//! | `network-config` | – | cloud-init's network-config, version 1 or 2 | `network.raw`, `network.mode: raw` |
//! | `address`* | `mac`, `method`, `address`, `gateway`, `public` | – | `network.nics[].addresses` |
//! | `meta`* | `key` | value | `metadata` |
//! | `label`* | – | text | `labels` |
//! | `record` | – | part of a record in YAML or JSON | merged over all of these |
//!
//! Elements with * may repeat, and every element is optional. The parser refuses unknown elements, so that a typo
//! cannot remove a VM's user-data unnoticed. Children may lack the namespace, as `virsh metadata --set` writes them.
//!
//! The parser drops a blank first line of a text and the indentation of the end tag. `&`, `<` and `]]>` need XML
//! escapes or CDATA. XML preserves no control characters but tab and line feed, so exact bytes belong in
//! base64.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use metadata_content::parser;
use roxmltree::Node;
use serde_json::{Map, Value, json};

use super::domain::shown;
use super::{LibvirtError, NAMESPACE};
use crate::record_part::{PAYLOADS, merge};

/// Most elements inside our element.
pub const ELEMENTS: usize = 1_024;

type Read<T> = Result<T, LibvirtError>;

/// An error about an element, with its line.
pub(super) fn wrong(node: Node<'_, '_>, expected: impl ToString, found: impl ToString) -> LibvirtError {
    let line = node.document().text_pos_at(node.range().start).row;
    LibvirtError::Instance { line, expected: expected.to_string(), found: found.to_string() }
}

/// Reads `<instance>` as a part of a record.
pub(super) fn read(instance: Node<'_, '_>) -> Read<Value> {
    attributes(instance, &[])?;
    let mut part = json!({});
    let mut over = None;
    let mut seen = Vec::new();
    for (count, node) in instance.children().filter(Node::is_element).enumerate() {
        if count == ELEMENTS {
            return Err(wrong(node, format_args!("at most {ELEMENTS} elements"), "one more"));
        }
        let name = node.tag_name().name();
        if !matches!(node.tag_name().namespace(), None | Some(NAMESPACE)) {
            return Err(wrong(
                node,
                "an element of our namespace",
                format_args!("<{}> of another", shown(name)),
            ));
        }
        if !matches!(name, "ssh-key" | "address" | "meta" | "label") {
            if seen.contains(&name) {
                return Err(wrong(node, format_args!("one <{}>", shown(name)), "a second"));
            }
            seen.push(name);
        }
        match name {
            "record" => over = Some(document(node)?),
            _ => element(&mut part, node, name)?,
        }
    }
    if let Some(over) = over {
        merge(&mut part, over);
    }
    Ok(part)
}

/// Sets the field of one element.
fn element(part: &mut Value, node: Node<'_, '_>, name: &str) -> Read<()> {
    match name {
        "hostname" => part["hostname"] = hostname(line(node)?),
        "instance-id" => part["vm"]["instance_id"] = line(node)?.into(),
        "namespace" => part["vm"]["namespace"] = line(node)?.into(),
        "instance-type" => part["instance_type"] = line(node)?.into(),
        "project" => part["vm"]["project"] = project(node)?,
        "placement" => part["placement"] = fields(node, &["region", "zone", "host", "fault-domain"])?.into(),
        "image" => {
            let names = ["id", "name", "publisher", "offer", "sku", "version"];
            part["image"] = fields(node, &names)?.into();
        }
        "ssh-key" => ssh_keys(list(&mut part["ssh_keys"]), node)?,
        "user-data" => part["user_data"] = payload(node)?,
        "vendor-data" => part["vendor_data"] = payload(node)?,
        "network-config" => {
            attributes(node, &[])?;
            part["network"]["mode"] = "raw".into();
            part["network"]["raw"] = body(node)?.into();
        }
        "address" => address(list(&mut part["network"]["nics"]), node)?,
        "meta" => {
            let [key] = attributes(node, &["key"])?;
            let key = key.ok_or_else(|| wrong(node, "an attribute `key` of <meta>", "none"))?;
            if !part["metadata"][key].is_null() {
                return Err(wrong(node, "each key of <meta> once", format_args!("`{}` twice", shown(key))));
            }
            part["metadata"][key] = content(node)?.into();
        }
        "label" => list(&mut part["labels"]).push(line(node)?.into()),
        other => {
            let expected = "hostname, instance-id, namespace, instance-type, project, placement, image, ssh-key, user-data, \
                            vendor-data, network-config, address, meta, label or record (libvirt.md in /usr/share/doc/xdp-imds)";
            return Err(wrong(node, expected, format_args!("<{}>", shown(other))));
        }
    }
    Ok(())
}

/// A host name with or without its domain.
fn hostname(name: &str) -> Value {
    match name.split_once('.') {
        Some((short, domain)) => json!({"short": short, "domain": domain}),
        None => json!({"short": name}),
    }
}

fn project(node: Node<'_, '_>) -> Read<Value> {
    let mut project = fields(node, &["id", "number", "account"])?;
    if let Some(Value::String(number)) = project.get("number") {
        let number: u64 =
            number.parse().map_err(|_| wrong(node, "a number in `number` of <project>", shown(number)))?;
        project.insert("number".into(), number.into());
    }
    Ok(project.into())
}

fn ssh_keys(keys: &mut Vec<Value>, node: Node<'_, '_>) -> Read<()> {
    let [name, user] = attributes(node, &["name", "user"])?;
    let lines =
        content(node)?.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    for key in lines {
        let name = match (name, keys.len()) {
            (Some(name), _) => name.to_owned(),
            (None, 0) => "default".to_owned(),
            (None, others) => format!("key-{others}"),
        };
        keys.push(match user {
            Some(user) => json!({"name": name, "key": key, "user": user}),
            None => json!({"name": name, "key": key}),
        });
    }
    Ok(())
}

fn payload(node: Node<'_, '_>) -> Read<Value> {
    let [encoding] = attributes(node, &["encoding"])?;
    match encoding {
        None => Ok(json!({"text": body(node)?})),
        Some("base64") => {
            let packed: Vec<u8> = content(node)?.bytes().filter(|b| !b.is_ascii_whitespace()).collect();
            // The content of a payload must not reach a log.
            let bytes = STANDARD.decode(packed);
            let bytes = bytes
                .map_err(|_| wrong(node, "standard base64 with padding (RFC 4648 §4)", "something else"))?;
            Ok(json!({"base64": STANDARD.encode(bytes)}))
        }
        Some(other) => Err(wrong(node, "no `encoding`, or `base64`", format_args!("`{}`", shown(other)))),
    }
}

/// Adds an address to the NIC of its MAC.
fn address(nics: &mut Vec<Value>, node: Node<'_, '_>) -> Read<()> {
    let mut entry = fields(node, &["mac", "method", "address", "gateway", "public"])?;
    let mac = entry.remove("mac").ok_or_else(|| wrong(node, "an attribute `mac` of <address>", "none"))?;
    if !entry.contains_key("method") {
        let method = if entry.contains_key("address") { "static" } else { "dhcp4" };
        entry.insert("method".into(), method.into());
    }
    let same = |nic: &&mut Value| nic["mac"] == mac;
    match nics.iter_mut().find(same) {
        Some(nic) => list(&mut nic["addresses"]).push(entry.into()),
        None => nics.push(json!({"mac": mac, "addresses": [entry]})),
    }
    Ok(())
}

/// A part of a record in YAML or JSON.
fn document(node: Node<'_, '_>) -> Read<Value> {
    attributes(node, &[])?;
    let expected = "a mapping in YAML or JSON in <record>";
    match parser::yaml::<Value>(body(node)?) {
        Ok(value @ Value::Object(_)) => {
            // Permission to define a domain must not give access to the host's files.
            let sourced = PAYLOADS.iter().find(|field| !value[**field]["source"].is_null());
            match sourced {
                Some(field) => {
                    let expected = format!("`text` or `base64` as {field}");
                    Err(wrong(node, expected, "`source`, which only a file beside the domain may name"))
                }
                None => Ok(value),
            }
        }
        Ok(Value::Null) => Ok(json!({})),
        Ok(_) => Err(wrong(node, expected, "something else")),
        Err(error) => Err(wrong(node, expected, parser::fault_of_yaml(body(node)?, &error))),
    }
}

fn list(value: &mut Value) -> &mut Vec<Value> {
    if !value.is_array() {
        *value = json!([]);
    }
    value.as_array_mut().expect("just made")
}

/// Attributes as record fields, with underscores for hyphens.
fn fields<const N: usize>(node: Node<'_, '_>, names: &[&str; N]) -> Read<Map<String, Value>> {
    let found = attributes(node, names)?;
    let pairs = names.iter().zip(found);
    Ok(pairs.filter_map(|(name, value)| Some((name.replace('-', "_"), value?.into()))).collect())
}

/// The values of these attributes; any other attribute is an error.
fn attributes<'a, const N: usize>(node: Node<'a, '_>, names: &[&str; N]) -> Read<[Option<&'a str>; N]> {
    let element = shown(node.tag_name().name());
    if let Some(other) = node.attributes().find(|a| a.namespace().is_some() || !names.contains(&a.name())) {
        let expected = match N {
            0 => format!("no attribute of <{element}>"),
            _ => format!("{} as attributes of <{element}>", names.join(", ")),
        };
        return Err(wrong(node, expected, format_args!("`{}`", shown(other.name()))));
    }
    Ok(names.map(|name| node.attribute(name)))
}

/// The text of an element without children.
fn content<'a>(node: Node<'a, '_>) -> Read<&'a str> {
    let mut others = node.children().filter(Node::is_element);
    if let Some(other) = others.next() {
        let expected =
            format!("text in <{}>; `<` is written `&lt;`, or all of it in CDATA", node.tag_name().name());
        return Err(wrong(node, expected, format_args!("<{}>", shown(other.tag_name().name()))));
    }
    let mut texts = node.children().filter(Node::is_text);
    match (texts.next(), texts.next()) {
        (None, _) => Ok(""),
        (Some(text), None) => Ok(text.text().unwrap_or_default()),
        // The parser joins text and CDATA, so a second node is a comment or a processing instruction.
        (Some(_), Some(_)) => {
            let expected = format!("text in <{}> without comments", node.tag_name().name());
            Err(wrong(node, expected, "a comment or instruction"))
        }
    }
}

/// One line of text, without surrounding white space.
fn line<'a>(node: Node<'a, '_>) -> Read<&'a str> {
    attributes(node, &[])?;
    Ok(content(node)?.trim())
}

/// Text without its layout: a blank first line, and the indentation of the end tag.
fn body<'a>(node: Node<'a, '_>) -> Read<&'a str> {
    let text = content(node)?;
    let text = match text.split_once('\n') {
        Some((first, rest)) if first.trim().is_empty() => rest,
        _ => text,
    };
    Ok(match text.rfind('\n') {
        Some(end) if text[end..].trim().is_empty() => &text[..=end],
        _ => text,
    })
}
