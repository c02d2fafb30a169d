//! Checks the laws of the HTTP server on any bytes, split in any way.
#![no_main]

#[path = "../laws/http.rs"]
mod laws;

libfuzzer_sys::fuzz_target!(|input: &[u8]| laws::assert_all(input));
