//! Ethernet addresses (IEEE 802-2014 §8.2).

/// An Ethernet (MAC) address, in wire order.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Mac(pub [u8; Mac::LEN]);

impl Mac {
    /// Length in bytes.
    pub const LEN: usize = 6;
    /// The broadcast address, all ones.
    pub const BROADCAST: Self = Self([0xff; Self::LEN]);
    /// The MAC of the metadata service, sent in ARP replies and neighbour advertisements. It is locally
    /// administered and the same on every port, so a migrated guest keeps a valid neighbour entry.
    pub const SERVICE: Self = Self([0x02, 0xa9, 0xfe, 0xa9, 0xfe, 0xfe]);

    /// True for a multicast address or the broadcast address. No station has such an address as its own.
    #[must_use]
    pub const fn is_group(self) -> bool {
        self.0[0] & 1 == 1
    }
}

#[cfg(any(test, feature = "std"))]
mod text {
    use super::Mac;
    use std::fmt;
    use std::str::FromStr;

    impl fmt::Display for Mac {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            let [a, b, c, d, e, g] = self.0;
            write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
        }
    }

    /// The text is not a MAC address.
    #[derive(Clone, Debug, PartialEq, Eq)]
    pub struct ParseMacError(String);

    impl fmt::Display for ParseMacError {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            write!(f, "expected a MAC address as six hex bytes (52:54:00:12:34:56), found `{}`", self.0)
        }
    }

    impl std::error::Error for ParseMacError {}

    impl FromStr for Mac {
        type Err = ParseMacError;

        /// Parses six two-digit hexadecimal bytes separated by colons, in either case.
        fn from_str(text: &str) -> Result<Self, Self::Err> {
            let refuse = || ParseMacError(text.into());
            let mut bytes = [0; Mac::LEN];
            let mut parts = text.split(':');
            for byte in &mut bytes {
                let part = parts.next().filter(|p| p.len() == 2 && p.bytes().all(|b| b.is_ascii_hexdigit()));
                *byte = u8::from_str_radix(part.ok_or_else(refuse)?, 16).map_err(|_| refuse())?;
            }
            if parts.next().is_some() { Err(refuse()) } else { Ok(Mac(bytes)) }
        }
    }
}

#[cfg(any(test, feature = "std"))]
pub use text::ParseMacError;

#[cfg(test)]
mod tests {
    use super::Mac;
    use std::string::ToString;

    #[test]
    fn text_round_trips_in_lower_case() {
        let mac: Mac = "52:54:00:AB:cd:0f".parse().expect("a valid address");
        assert_eq!(mac.to_string(), "52:54:00:ab:cd:0f");
    }

    #[test]
    fn malformed_text_is_refused() {
        for text in [
            "",
            "52:54:00:12:34",
            "52:54:00:12:34:56:78",
            "52-54-00-12-34-56",
            "5:54:00:12:34:56",
            "+2:54:00:12:34:56",
            "zz:54:00:12:34:56",
        ] {
            assert!(text.parse::<Mac>().is_err(), "{text} was accepted");
        }
    }
}
