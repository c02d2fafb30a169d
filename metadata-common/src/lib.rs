//! What the two sides of xdp-imds share.
//!
//! The kernel side (`metadata-ebpf`) and the user side (`metadata-user`) share only this crate: frame
//! classification, the names of the verdicts, and the layout of the maps. The crate is `no_std`, does not
//! allocate and does not panic. The same code therefore runs in the kernel, in unit tests and under the
//! fuzzer.
//!
//! With the feature `std` it also has the plain values that the crates of the user side share, without I/O, a clock
//! or a dependency: served addresses, the endpoints of a connection, port names, times, fair shares, and text that is
//! safe to print.
#![cfg_attr(not(any(test, feature = "std")), no_std)]

pub mod answer;
pub mod bucket;
pub mod classify;
pub mod cookie;
pub mod decide;
pub mod drain;
pub mod mac;
pub mod maps;
pub mod siphash;
pub mod stamp;
pub mod trace;
pub mod verdict;
pub mod wire;

#[cfg(any(test, feature = "std"))]
pub mod addresses;
#[cfg(any(test, feature = "std"))]
pub mod port;
#[cfg(any(test, feature = "std"))]
pub mod printable;
#[cfg(any(test, feature = "std"))]
pub mod run;
#[cfg(any(test, feature = "std"))]
pub mod share;
#[cfg(any(test, feature = "std"))]
pub mod time;
