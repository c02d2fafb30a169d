//! The endpoints of a guest's TCP connection.

use metadata_common::maps::Slot;
use std::net::IpAddr;

/// The slot and the endpoints of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Connection {
    /// The slot that the kernel found for the frame.
    pub slot: Slot,
    /// The address and port the guest connected to.
    pub local: (IpAddr, u16),
    /// The address and port that the guest claims: for logs and dialect rules, never for identity.
    pub remote: (IpAddr, u16),
}
