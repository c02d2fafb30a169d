//! Plain values that the user-space crates share, without I/O, a clock or a dependency.
//!
//! They live here so that `metadata-content` (records, no frames) and `metadata-datapath` (frames, no records) do not
//! depend on each other.

pub mod addresses;
pub mod connection;
pub mod hex;
pub mod port;
pub mod printable;
pub mod run;
pub mod share;
pub mod time;
