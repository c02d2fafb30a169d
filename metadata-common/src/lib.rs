//! What the two sides of xdp-imds share.
//!
//! The kernel side (`metadata-ebpf`) and the user side (`metadata-user`) share only this crate: frame
//! classification, the names of the verdicts, and the layout of the maps. The crate is `no_std`, does not
//! allocate and does not panic. The same code therefore runs in the kernel, in unit tests and under the
//! fuzzer.
#![no_std]

#[cfg(any(test, feature = "std"))]
extern crate std;

pub mod answer;
pub mod bucket;
pub mod classify;
pub mod cookie;
pub mod decide;
pub mod drain;
pub mod mac;
pub mod maps;
pub mod stamp;
pub mod trace;
pub mod verdict;
pub mod wire;
