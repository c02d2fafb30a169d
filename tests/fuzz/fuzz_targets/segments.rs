//! Checks the laws of the TCP stack on any segments, in any state of a connection.
#![no_main]

#[path = "../laws/segments.rs"]
mod laws;

libfuzzer_sys::fuzz_target!(|input: &[u8]| laws::assert_all(input));
