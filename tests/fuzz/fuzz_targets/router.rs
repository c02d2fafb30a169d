//! Any request at all to a VM with everything in its record.
#![no_main]

#[path = "../laws/router.rs"]
mod laws;

libfuzzer_sys::fuzz_target!(|input: &[u8]| laws::assert_all(input));
