//! The words both sides of xdp-imds share.
//!
//! The kernel side (`metadata-ebpf`) and the user side (`metadata-user`) agree on these and on nothing
//! else: how a frame is classified, what each verdict is called, and how the maps between them are laid
//! out. Everything here is `no_std`, allocates nothing and never panics, so the same lines run in the
//! kernel, in unit tests and under the fuzzer.
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
