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

use std::collections::BTreeMap;
use std::net::IpAddr;

use super::Problem;
use super::custom::is_custom;
use super::property::{boolean, is_space, unescaped, words};

/// Most octets of a configuration: the most that pmxcfs stores in a file (`MEMDB_MAX_FILE_SIZE` in memdb.h).
pub const FILE_OCTETS: usize = 1 << 20;

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
    pub fn parse(octets: &[u8]) -> Result<(Self, Vec<Problem>), Problem> {
        if octets.len() > FILE_OCTETS {
            return Err(Problem::file(format_args!("at most {FILE_OCTETS} octets"), "more"));
        }
        let mut config = Self::default();
        let (mut description, mut problems) = (Vec::new(), Vec::new());
        for line in octets.split(|octet| *octet == b'\n') {
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
    fn setting(&mut self, line: &[u8], description: &mut Vec<u8>) -> Result<Option<Problem>, Problem> {
        let Some((key, value)) = split(line) else { return Ok(None) };
        let Ok(value) = std::str::from_utf8(value) else {
            // A setting that no document needs may be in any encoding.
            let is_ours = QUOTED.contains(&key) || FORMATS.iter().any(|(ours, ..)| *ours == key);
            return Ok(is_ours.then(|| Problem::setting(key, "UTF-8", "other octets")));
        };
        if key == "description" {
            description.extend_from_slice(&unescaped(value));
            return Ok(None);
        }
        if self.settings.len() >= SETTINGS {
            return Err(Problem::file(format_args!("at most {SETTINGS} settings"), "more"));
        }
        if let Some((_, expected, _)) = FORMATS.iter().find(|(ours, _, is)| *ours == key && !is(value)) {
            return Ok(Some(Problem::value(key, expected, value)));
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
    let end = line.iter().rposition(|octet| !is_space(char::from(*octet)));
    end.is_some_and(|end| line[end] == b']' && !line[..end].contains(&b']'))
}

/// Splits `key: value`, where a key is `[a-z][a-z_-]*[0-9]*` and a value is not empty. Of white space alone the last octet
/// is the value: `qm set --ciuser '""'` leaves such a line.
fn split(line: &[u8]) -> Option<(&str, &[u8])> {
    let colon = line.iter().position(|octet| *octet == b':')?;
    let key = std::str::from_utf8(&line[..colon]).ok()?;
    let letters = key.trim_end_matches(|c: char| c.is_ascii_digit());
    let good = letters.starts_with(|c: char| c.is_ascii_lowercase())
        && letters.bytes().all(|octet| octet.is_ascii_lowercase() || matches!(octet, b'_' | b'-'));
    let is_text = |octet: &u8| !is_space(char::from(*octet));
    let value = &line[colon + 1..];
    let end = value.iter().rposition(is_text).or_else(|| value.len().checked_sub(1))?;
    let start = value.iter().position(is_text).unwrap_or(end);
    good.then_some((key, &value[start..=end]))
}

/// `pve_verify_dns_name` in JSONSchema.pm.
fn is_dns_name(text: &str) -> bool {
    text.split('.').all(|label| {
        let inner = |octet: u8| octet.is_ascii_alphanumeric() || octet == b'-';
        !label.is_empty() && label.bytes().all(inner) && !label.starts_with('-') && !label.ends_with('-')
    })
}

fn is_address(text: &str) -> bool {
    text.parse::<IpAddr>().is_ok() || is_dns_name(text)
}

/// `pve_verify_urlencoded` in JSONSchema.pm.
fn is_urlencoded(octet: u8) -> bool {
    octet.is_ascii_alphanumeric() || b"-%_.!~*'()".contains(&octet)
}
