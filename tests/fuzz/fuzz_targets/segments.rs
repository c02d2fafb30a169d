//! Any segments at all, in any state of their connection.
#![no_main]

#[path = "../laws/segments.rs"]
mod laws;

libfuzzer_sys::fuzz_target!(|input: &[u8]| laws::assert_all(input));
