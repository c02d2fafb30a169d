//! Any text as a configuration.
#![no_main]

#[path = "../laws/config.rs"]
mod laws;

libfuzzer_sys::fuzz_target!(|input: &[u8]| laws::assert_all(input));
