//! Checks the laws of the snapshot reader on any file.
#![no_main]

#[path = "../laws/snapshot.rs"]
mod laws;

libfuzzer_sys::fuzz_target!(|input: &[u8]| laws::assert_all(input));
