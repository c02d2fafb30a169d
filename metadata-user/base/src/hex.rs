//! Octets as hexadecimal text.

use std::fmt::Write as _;

/// Returns two lower-case digits for each octet.
#[must_use]
pub fn hex(octets: &[u8]) -> String {
    octets.iter().fold(String::with_capacity(octets.len() * 2), |mut text, octet| {
        write!(text, "{octet:02x}").expect("writing to a String cannot fail");
        text
    })
}
