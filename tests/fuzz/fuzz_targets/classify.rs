//! Any octets at all, as a frame from a guest, against the laws of the policy.
#![no_main]

#[path = "../laws/classify.rs"]
mod laws;

libfuzzer_sys::fuzz_target!(|frame: &[u8]| laws::assert_all(frame));
