//! Reads a VM's configuration file (`parse_vm_config` in qemu-server's QemuServer.pm).
//!
//! ```text
//! # a description, percent-encoded
//! name: web-1
//! net0: virtio=BC:24:11:00:00:01,bridge=vmbr0
//!
//! [PENDING]
//! memory: 4096
//! ```
//!
//! Only the part before the first section describes the VM as it runs. `[PENDING]` comes into force at its next start,
//! when qemu-server moves it; snapshots and `[special:…]` never do.

use percent_encoding::percent_decode_str;
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::PathBuf;

use super::ProxmoxProblem;
use super::drive::is_custom;

/// Most bytes of a configuration: the most that pmxcfs stores in a file (`MEMDB_MAX_FILE_SIZE` in memdb.h).
pub const FILE_BYTES: usize = 1 << 20;

/// Most settings of a configuration; the largest VM has a few hundred.
pub const SETTINGS: usize = 2_048;

/// Settings without a format: qemu-server drops the quotes around their values (`check_type` in QemuServer.pm).
const QUOTED: [&str; 6] = ["arch", "cipassword", "citype", "ciuser", "ostype", "searchdomain"];

/// A setting, what is expected of it, and its format. qemu-server ignores a value of another format (`check_type`).
type Format = (&'static str, &'static str, fn(&str) -> bool);

const FORMATS: [Format; 7] = [
    ("cicustom", "files for `user`, `network`, `meta` and `vendor`", is_custom),
    ("ciupgrade", "0 or 1", |text| boolean(text).is_some()),
    ("name", "a DNS name", is_dns_name),
    ("nameserver", "addresses of resolvers", |text| words(text).all(is_address)),
    ("sshkeys", "percent-encoded keys", |text| text.bytes().all(is_urlencoded)),
    ("tags", "tags", |_| true),
    ("template", "0 or 1", |text| boolean(text).is_some()),
];

/// The settings of a VM.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct VmConfig {
    settings: BTreeMap<String, String>,
    /// The description, decoded.
    pub description: String,
}

impl std::fmt::Debug for VmConfig {
    /// Prints names only: a value may be a password.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_set().entries(self.settings.keys()).finish()
    }
}

impl VmConfig {
    /// Reads the text of a configuration. Skips lines that qemu-server skips, and settings whose value it refuses; the
    /// problems name those.
    ///
    /// # Errors
    /// The text is too large.
    pub fn parse(bytes: &[u8]) -> Result<(Self, Vec<ProxmoxProblem>), ProxmoxProblem> {
        if bytes.len() > FILE_BYTES {
            return Err(ProxmoxProblem::file(format_args!("at most {FILE_BYTES} bytes"), "more"));
        }
        let mut config = Self::default();
        let (mut description, mut problems) = (Vec::new(), Vec::new());
        for line in bytes.split(|byte| *byte == b'\n') {
            match line {
                [b'[', ..] if is_section(line) => break,
                [b'#', text @ ..] => {
                    description.extend_from_slice(&unescaped(&String::from_utf8_lossy(text)));
                    description.push(b'\n');
                }
                _ => problems.extend(config.setting(line, &mut description)?),
            }
        }
        config.description = String::from_utf8_lossy(&description).trim_end().to_owned();
        Ok((config, problems))
    }

    /// Takes one line, and returns what is wrong with its value.
    fn setting(
        &mut self,
        line: &[u8],
        description: &mut Vec<u8>,
    ) -> Result<Option<ProxmoxProblem>, ProxmoxProblem> {
        let Some((key, value)) = split(line) else { return Ok(None) };
        let Ok(value) = std::str::from_utf8(value) else {
            // A setting that no document needs may be in any encoding.
            let is_ours = QUOTED.contains(&key) || FORMATS.iter().any(|(ours, ..)| *ours == key);
            return Ok(is_ours.then(|| ProxmoxProblem::setting(key, "UTF-8", "other bytes")));
        };
        if key == "description" {
            description.extend_from_slice(&unescaped(value));
            return Ok(None);
        }
        if self.settings.len() >= SETTINGS {
            return Err(ProxmoxProblem::file(format_args!("at most {SETTINGS} settings"), "more"));
        }
        if let Some((_, expected, _)) = FORMATS.iter().find(|(ours, _, is)| *ours == key && !is(value)) {
            return Ok(Some(ProxmoxProblem::value(key, expected, value)));
        }
        let inside = value.strip_prefix('"').and_then(|value| value.strip_suffix('"'));
        let value = inside.filter(|_| QUOTED.contains(&key)).unwrap_or(value);
        self.settings.insert(key.to_owned(), value.to_owned());
        Ok(None)
    }

    /// The value of a setting.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&str> {
        self.settings.get(key).map(String::as_str)
    }

    /// True if a setting is on; `None` if it is absent or no boolean, which qemu-server treats alike.
    #[must_use]
    pub fn flag(&self, key: &str) -> Option<bool> {
        self.get(key).and_then(boolean)
    }

    /// True for a template, which never runs.
    #[must_use]
    pub fn is_template(&self) -> bool {
        self.flag("template") == Some(true)
    }

    /// True if the guest is Windows (`windows_version` in Helpers.pm).
    #[must_use]
    pub fn is_windows(&self) -> bool {
        let old = ["wxp", "w2k3", "w2k", "w2k8", "wvista"];
        let numbered = |kind: &str| {
            let number = kind.strip_prefix("win").unwrap_or_default();
            number.bytes().all(|digit| digit.is_ascii_digit()) && number.bytes().any(|digit| digit != b'0')
        };
        self.get("ostype").is_some_and(|kind| old.contains(&kind) || numbered(kind))
    }

    /// The settings `<prefix><n>` with their numbers below `most`, in the order in which qemu-server's Perl sorts their
    /// names: `net0`, `net1`, `net10`, `net2`.
    pub(super) fn numbered(&self, prefix: &str, most: u8) -> impl Iterator<Item = (u8, &str)> {
        self.settings.iter().filter_map(move |(key, value)| {
            let digits = key.strip_prefix(prefix)?;
            let number = digits.parse().ok().filter(|number: &u8| number.to_string() == digits)?;
            (number < most).then_some((number, value.as_str()))
        })
    }
}

/// True for `[name]`, with white space behind it.
fn is_section(line: &[u8]) -> bool {
    let end = line.iter().rposition(|byte| !is_space(char::from(*byte)));
    end.is_some_and(|end| line[end] == b']' && !line[..end].contains(&b']'))
}

/// Splits `key: value`, where a key is `[a-z][a-z_-]*[0-9]*` and a value is not empty. Of white space alone the last
/// byte is the value: `qm set --ciuser '""'` leaves such a line.
fn split(line: &[u8]) -> Option<(&str, &[u8])> {
    let colon = line.iter().position(|byte| *byte == b':')?;
    let key = std::str::from_utf8(&line[..colon]).ok()?;
    let letters = key.trim_end_matches(|c: char| c.is_ascii_digit());
    let good = letters.starts_with(|c: char| c.is_ascii_lowercase())
        && letters.bytes().all(|byte| byte.is_ascii_lowercase() || matches!(byte, b'_' | b'-'));
    let is_text = |byte: &u8| !is_space(char::from(*byte));
    let value = &line[colon + 1..];
    let end = value.iter().rposition(is_text).or_else(|| value.len().checked_sub(1))?;
    let start = value.iter().position(is_text).unwrap_or(end);
    good.then_some((key, &value[start..=end]))
}

/// `pve_verify_dns_name` in JSONSchema.pm.
fn is_dns_name(text: &str) -> bool {
    text.split('.').all(|label| {
        let inner = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
        !label.is_empty() && label.bytes().all(inner) && !label.starts_with('-') && !label.ends_with('-')
    })
}

fn is_address(text: &str) -> bool {
    text.parse::<IpAddr>().is_ok() || is_dns_name(text)
}

/// `pve_verify_urlencoded` in JSONSchema.pm.
fn is_urlencoded(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"-%_.!~*'()".contains(&byte)
}

// The small formats inside a configuration: lists of `key=value`, booleans, percent-encoding.

/// What Perl's `\s` matches in bytes.
pub(super) fn is_space(c: char) -> bool {
    matches!(c, ' ' | '\t' | '\n' | '\r' | '\x0b' | '\x0c')
}

/// Splits a list such as `virtio=BC:24:11:00:00:01,bridge=vmbr0` (`parse_property_string` in pve-common's
/// JSONSchema.pm). A part without `=` is the value of `default`; empty parts are dropped.
///
/// # Errors
/// A key occurs twice, or has no value; or a part has no key and the list has no default. The text says what was
/// expected and repeats no value.
pub(super) fn list<'a>(
    text: &'a str,
    default: Option<&'a str>,
) -> Result<BTreeMap<&'a str, &'a str>, &'static str> {
    let mut found = BTreeMap::new();
    for part in text.split(',').filter(|part| !part.chars().all(is_space)) {
        let (key, value) = match part.split_once('=') {
            Some((key, value)) if !key.is_empty() && !value.is_empty() => (key, value),
            Some(_) => return Err("a key and a value around each `=`"),
            None => (default.ok_or("`key=value`, separated by commas")?, part),
        };
        if found.insert(key, value).is_some() {
            return Err("each key once");
        }
    }
    Ok(found)
}

/// Reads a boolean (`parse_boolean` in JSONSchema.pm).
pub(super) fn boolean(text: &str) -> Option<bool> {
    let is = |words: [&str; 4]| words.iter().any(|word| text.eq_ignore_ascii_case(word));
    if is(["1", "on", "yes", "true"]) {
        return Some(true);
    }
    is(["0", "off", "no", "false"]).then_some(false)
}

/// Decodes `%2B` and the like; a `%` without two hex digits stays (Perl's `uri_unescape`).
pub(super) fn unescaped(text: &str) -> Cow<'_, [u8]> {
    percent_decode_str(text).into()
}

/// Splits a list of words (`PVE::Tools::split_list`: white space, commas, semicolons and NUL).
pub(super) fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c| is_space(c) || matches!(c, ',' | ';' | '\0')).filter(|word| !word.is_empty())
}

// The section `proxmox` of the configuration.

/// Default directory of configurations: those of the VMs that are on this node.
pub const DEFAULT_DIRECTORY: &str = "/etc/pve/qemu-server";

/// Default directory of files with parts of records.
pub const DEFAULT_FILES: &str = "/etc/xdp-imds/proxmox";

/// How the agent finds and serves the VMs of a Proxmox VE node; `proxmox: {}` serves every VM on it.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct ProxmoxOptions {
    /// Directory of the VMs' configurations, `<vmid>.conf`.
    pub directory: PathBuf,
    /// Directory of files with parts of records: `defaults.yaml` for all VMs, `<vmid>.yaml` for one.
    pub files: PathBuf,
    /// The configuration of the cluster's storages, which hold the files that `cicustom` names.
    pub storages: PathBuf,
    /// The name of the cluster, in the subjects and ids of its VMs; by default that of `corosync`, and `local` for a
    /// node without a cluster. Set it before such a node joins one: with another name its VMs have other owners.
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

impl Default for ProxmoxOptions {
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
    use std::path::Path;

    use super::{DEFAULT_DIRECTORY, ProxmoxOptions, boolean, list, unescaped, words};

    #[test]
    fn a_list_has_each_key_once_and_may_have_a_default() {
        let net = list("virtio=BC:24:11:00:00:01,bridge=vmbr0,,firewall=1", Some("model")).expect("a list");
        assert_eq!(net["virtio"], "BC:24:11:00:00:01");
        assert_eq!(net["firewall"], "1");
        assert_eq!(list("virtio,bridge=vmbr0", Some("model")).expect("a list")["model"], "virtio");
        assert_eq!(list("serial=ZHM9,base64=1", None).expect("a list")["serial"], "ZHM9");
        assert_eq!(list("a=b=c", None).expect("a list")["a"], "b=c");
        for wrong in ["a=1,a=2", "a=", "=a", "a"] {
            list(wrong, None).expect_err(wrong);
        }
    }

    #[test]
    fn booleans_have_four_words_each() {
        for (text, expected) in
            [("1", Some(true)), ("On", Some(true)), ("no", Some(false)), ("FALSE", Some(false)), ("2", None)]
        {
            assert_eq!(boolean(text), expected, "{text}");
        }
    }

    #[test]
    fn escapes_without_two_digits_stay() {
        assert_eq!(&*unescaped("ssh-rsa%20AA%2B%0A"), b"ssh-rsa AA+\n");
        assert_eq!(&*unescaped("100%, %zz %4"), b"100%, %zz %4");
    }

    #[test]
    fn words_are_separated_by_any_separator() {
        assert_eq!(words(" a;b, c\td ").collect::<Vec<_>>(), ["a", "b", "c", "d"]);
    }

    #[test]
    fn absent_options_have_defaults_and_unknown_ones_are_refused() {
        let options: ProxmoxOptions = serde_yaml::from_str("{}").expect("all defaults");
        assert_eq!(options, ProxmoxOptions::default());
        let options: ProxmoxOptions = serde_yaml::from_str("{files: /parts, region: eu}").expect("options");
        assert_eq!(options.directory, Path::new(DEFAULT_DIRECTORY));
        assert_eq!((options.files.as_path(), &*options.region), (Path::new("/parts"), "eu"));
        serde_yaml::from_str::<ProxmoxOptions>("{directry: /etc/pve}").expect_err("a typo");
    }
}
