//! A TCP connection of a guest, as an exchange knows it.

use metadata_common::maps::Slot;
use std::net::IpAddr;

/// Who opened a connection, and to what.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Connection {
    /// The identity the kernel decided on.
    pub slot: Slot,
    /// The address and port the guest connected to.
    pub local: (IpAddr, u16),
    /// The guest's claimed address and port: for logs and dialect rules, never for identity.
    pub remote: (IpAddr, u16),
}
