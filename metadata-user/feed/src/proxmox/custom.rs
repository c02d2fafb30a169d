//! `cicustom`: files on a storage that replace documents of the drive.

use std::path::{Path, PathBuf};

use bytes::Bytes;
use serde_json::{Map, Value, json};

use super::config::{is_space, list};
use super::{ProxmoxProblem, VmConfig};
use crate::record_part::merge;
use metadata_content::parser;
use metadata_content::record::values::excerpt;

/// Most bytes of a file that `cicustom` names (`read_cloudinit_snippets_file` in Cloudinit.pm).
pub const SNIPPET_BYTES: usize = 1 << 20;

/// The documents that a file may replace, in the order of [`Custom`]'s fields.
pub const PARTS: [&str; 4] = ["user", "network", "meta", "vendor"];

/// The content of the files; `None` where the drive's own document applies.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Custom {
    /// User-data.
    pub user: Option<Bytes>,
    /// Network configuration.
    pub network: Option<Bytes>,
    /// Meta-data.
    pub meta: Option<Bytes>,
    /// Vendor-data.
    pub vendor: Option<Bytes>,
}

/// The format of `cicustom`.
pub(super) fn is_custom(text: &str) -> bool {
    list(text, None).is_ok_and(|named| named.keys().all(|key| PARTS.contains(key)))
}

/// The files that a configuration names, in the order of [`PARTS`], by their paths on this node.
///
/// # Errors
/// A file is not a snippet of a storage with a directory.
pub fn snippets(config: &VmConfig, storages: &str) -> Result<[Option<PathBuf>; 4], ProxmoxProblem> {
    let Some(text) = config.get("cicustom") else { return Ok(Default::default()) };
    let named = list(text, None).map_err(|expected| ProxmoxProblem::value("cicustom", expected, text))?;
    let mut paths: [Option<PathBuf>; 4] = Default::default();
    for (path, part) in paths.iter_mut().zip(PARTS) {
        *path = named.get(part).map(|volume| snippet(part, volume, storages)).transpose()?;
    }
    Ok(paths)
}

/// The path of a volume such as `local:snippets/user.yaml`. A name with a slash would lead out of the directory.
fn snippet(part: &'static str, volume: &str, storages: &str) -> Result<PathBuf, ProxmoxProblem> {
    let (storage, name) = volume.split_once(':').unwrap_or(("", volume));
    let name =
        name.strip_prefix("snippets/").filter(|name| !name.contains('/') && !matches!(*name, "." | ".."));
    let (false, Some(name)) = (storage.is_empty(), name) else {
        let expected = "a file `STORAGE:snippets/NAME`";
        return Err(ProxmoxProblem::custom(part, expected, format_args!("`{}`", excerpt(volume))));
    };
    let directory = directory(storage, storages).ok_or_else(|| {
        let found = format!("none of storage `{}`", excerpt(storage));
        ProxmoxProblem::custom(part, "a directory of snippets in storage.cfg", found)
    })?;
    Ok(directory.join(name))
}

/// The directory of a storage's snippets, by `/etc/pve/storage.cfg`. Storages without `path` are mounted by Proxmox VE
/// below `/mnt/pve` (NFS, CIFS, CephFS), and `local` exists even in an empty file.
fn directory(storage: &str, storages: &str) -> Option<PathBuf> {
    let mut sections = storages.lines().scan(false, |ours, line| {
        if let Some((kind, name)) = line.split_once(':').filter(|_| !line.starts_with(is_space)) {
            *ours = name.trim() == storage && !kind.starts_with('#');
            return Some(ours.then_some((kind, "")));
        }
        Some(line.trim().split_once(is_space).filter(|_| *ours).map(|(key, value)| (key, value.trim())))
    });
    let (kind, _) = match sections.by_ref().flatten().next() {
        Some(head) => head,
        None if storage == "local" => return Some(PathBuf::from("/var/lib/vz/snippets")),
        None => return None,
    };
    let (mut path, mut below) = (None, "snippets");
    for (key, value) in sections.flatten() {
        match key {
            "path" => path = Some(PathBuf::from(value)),
            "content-dirs" => {
                below = value.split(',').find_map(|dir| dir.strip_prefix("snippets=")).unwrap_or(below)
            }
            _ => {}
        }
    }
    let mounted = matches!(kind, "nfs" | "cifs" | "cephfs");
    let path = path.or_else(|| mounted.then(|| Path::new("/mnt/pve").join(storage)))?;
    Some(path.join(below.trim_start_matches('/')))
}

/// Record fields from a file of meta-data: NoCloud's YAML, or the JSON of a config drive. Instance id and host name
/// have fields; other words become custom metadata.
pub(super) fn meta(bytes: &[u8]) -> Result<Value, ProxmoxProblem> {
    let wrong = |found: &str| ProxmoxProblem::custom("meta", "a mapping in YAML or JSON", found);
    // The parser's message could repeat the content.
    let document = parser::yaml::<Map<String, Value>>(bytes).map_err(|_| wrong("something else"))?;
    let mut part = json!({});
    let mut words = Map::new();
    for (key, value) in document {
        match (&*key, word(&value)) {
            ("instance-id" | "instance_id" | "uuid", Some(id)) => part["vm"] = json!({"instance_id": id}),
            ("local-hostname" | "hostname", Some(name)) => part["hostname"] = hostname(&name),
            ("meta", _) => {
                let inner = value.as_object().into_iter().flatten();
                words.extend(inner.filter_map(|(key, value)| Some((key.clone(), word(value)?.into()))));
            }
            (_, Some(value)) => drop(words.insert(key, value.into())),
            (_, None) => {}
        }
    }
    merge(&mut part, json!({"metadata": words}));
    Ok(part)
}

fn word(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Number(number) => Some(number.to_string()),
        Value::Bool(flag) => Some(flag.to_string()),
        _ => None,
    }
}

/// A host name with or without its domain.
pub(super) fn hostname(name: &str) -> Value {
    match name.split_once('.') {
        Some((short, domain)) => json!({"short": short, "domain": domain}),
        // `null` removes the domain of the configuration.
        None => json!({"short": name, "domain": null}),
    }
}
