//! `metadata`: custom keys of a VM, and the restrictions that dialects put on them.

use super::Record;
use super::dialects::Dialect;
use super::parse::way;
use super::serving::DateTree;
use super::validate::{Checked, Validator};
use super::values::excerpt;

/// Keys that NoCloud's meta-data reserves. It omits entries of `metadata` with these names.
pub const RESERVED_KEYS: [&str; 9] = [
    "instance-id",
    "local-hostname",
    "public-keys",
    "dsmode",
    "seedfrom",
    "network-interfaces",
    "availability-zone",
    "region",
    "instance-type",
];

/// Keys that Oracle's `metadata` reserves. It omits entries of the record's `metadata` with these names.
pub const ORACLE_KEYS: [&str; 2] = ["ssh_authorized_keys", "user_data"];

/// Attributes that GCE reserves. It omits entries of `metadata` with these names.
pub const GCE_ATTRIBUTES: [&str; 3] = ["ssh-keys", "user-data", "user-data-encoding"];

/// Returns whether a key can be the last segment of a URL path. GCE serves each attribute at such a path.
#[must_use]
pub fn is_segment(key: &str) -> bool {
    !matches!(key, "." | "..")
}

/// Maximum length of a `metadata` key that EC2 serves as an instance tag, in characters.
const TAG_CHARS: usize = 128;

/// Returns whether EC2 can serve an entry of `metadata` as an instance tag.
///
/// A key must fit a listing and a path, and a value must be one line. Clients parse a listed `0=name` as a public key
/// and a value of several lines as a list.
#[must_use]
pub fn is_instance_tag(key: &str, value: &str) -> bool {
    let clean = |b: u8| b.is_ascii_alphanumeric() || b"+-=.,_:@".contains(&b);
    let numbered = key.split_once('=').is_some_and(|(number, _)| number.bytes().all(|b| b.is_ascii_digit()));
    (1..=TAG_CHARS).contains(&key.len())
        && key.bytes().all(clean)
        && !numbered
        && !matches!(key, "." | ".." | "_index")
        && !value.contains('\n')
}

impl Validator<'_> {
    /// Checks keys and values against the limits. Warns of each entry that a dialect omits.
    pub(super) fn metadata(&mut self, record: &Record) -> Checked {
        let entries = &record.metadata.0;
        let has_password = record.admin.as_ref().is_some_and(|admin| admin.password.is_some());
        self.at_most(&way!["metadata"], self.limits.metadata_keys, entries.len(), "keys")?;
        for (key, value) in entries {
            let here = way!["metadata", key.as_str()];
            let named = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-');
            if key.is_empty() || key.len() > self.limits.metadata_chars || !key.bytes().all(named) {
                let found = format!("`{}`", excerpt(key));
                let expected =
                    format!("a key of 1 to {} letters, digits, `.`, `_` and `-`", self.limits.metadata_chars);
                return Err(self.refuse(&here, expected, found, "rename it"));
            }
            self.at_most(&here, self.limits.metadata_chars, value.chars().count(), "characters")?;
            if RESERVED_KEYS.contains(&key.as_str()) {
                let message = "NoCloud's meta-data reserves this key and omits this value; rename it";
                self.warn(&here, message);
            }
            if key == "admin_pass" && has_password && record.serve.serves(Dialect::OpenStack) {
                let message =
                    "left out of OpenStack's meta: admin.password is served as `admin_pass`; rename it";
                self.warn(&here, message);
            }
            if ORACLE_KEYS.contains(&key.as_str()) && record.serve.serves(Dialect::Oracle) {
                let message = "Oracle's metadata reserves this key and omits this value; rename it";
                self.warn(&here, message);
            }
            if GCE_ATTRIBUTES.contains(&key.as_str()) && record.serve.serves(Dialect::Gce) {
                let message = "GCE reserves this attribute and omits this value; rename it";
                self.warn(&here, message);
            }
            if !is_segment(key) && record.serve.serves(Dialect::Gce) {
                self.warn(&here, "left out of GCE's attributes: no URL path can end in this key; rename it");
            }
            let tree = record.serve.date_tree == DateTree::Ec2 && record.serve.serves(Dialect::Ec2);
            if tree && !is_instance_tag(key, value) {
                let message = format!(
                    "not served as an instance tag by ec2: expected a key of at most {TAG_CHARS} characters other \
                     than `.`, `..` and `_index`, and a value of one line"
                );
                self.warn(&here, message);
            }
        }
        Ok(())
    }
}
