//! The name of a port: interface and network namespace.

use std::fmt;

/// Longest interface name, in bytes (`IFNAMSIZ` less its NUL).
pub const MAX_IFNAME: usize = 15;

/// A tap, named by interface and network namespace.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PortName {
    /// The interface name inside its namespace, at most 15 bytes.
    pub ifname: String,
    /// The namespace: a name under `/run/netns`, or an absolute path such as `/proc/4242/ns/net`. `None` means the
    /// agent's own.
    pub netns: Option<String>,
}

impl PortName {
    /// A port in the agent's own namespace.
    #[must_use]
    pub fn local(ifname: impl Into<String>) -> Self {
        Self { ifname: ifname.into(), netns: None }
    }
}

impl fmt::Display for PortName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.netns {
            Some(netns) => write!(f, "{} in {netns}", self.ifname),
            None => f.write_str(&self.ifname),
        }
    }
}

/// True for a name the kernel would take for an interface (`dev_valid_name` in net/core/dev.c).
#[must_use]
pub fn is_ifname(name: &str) -> bool {
    !name.is_empty()
        && name.len() <= MAX_IFNAME
        && name != "."
        && name != ".."
        && !name.bytes().any(|b| b == b'/' || b == b':' || b.is_ascii_whitespace())
}
