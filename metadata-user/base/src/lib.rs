//! What every crate of the user side shares: plain values without I/O, a clock, or a dependency.
//!
//! It is there so that `metadata-content`, which knows no frames, and `metadata-datapath`, which knows no records,
//! need not know each other.

pub mod addresses;
pub mod connection;
pub mod port;
pub mod run;
pub mod time;
