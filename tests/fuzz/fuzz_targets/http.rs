//! Any octets at all, in any pieces, as what a guest says over a connection.
#![no_main]

#[path = "../laws/http.rs"]
mod laws;

libfuzzer_sys::fuzz_target!(|input: &[u8]| laws::assert_all(input));
