//! Checks the laws of the router on any request to a VM with a full record.
#![no_main]

#[path = "../laws/router.rs"]
mod laws;

libfuzzer_sys::fuzz_target!(|input: &[u8]| laws::assert_all(input));
