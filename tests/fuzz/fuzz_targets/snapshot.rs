//! Any file as the snapshot of records.
#![no_main]

#[path = "../laws/snapshot.rs"]
mod laws;

libfuzzer_sys::fuzz_target!(|input: &[u8]| laws::assert_all(input));
