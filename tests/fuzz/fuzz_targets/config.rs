//! Checks the laws of the configuration parser on any text.
#![no_main]

#[path = "../laws/config.rs"]
mod laws;

libfuzzer_sys::fuzz_target!(|input: &[u8]| laws::assert_all(input));
