//! Checks the laws of the record parser on any text.
#![no_main]

#[path = "../laws/record.rs"]
mod laws;

libfuzzer_sys::fuzz_target!(|input: &[u8]| laws::assert_all(input));
