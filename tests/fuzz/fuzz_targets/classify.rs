//! Checks the laws of the steering policy on any bytes as a frame.
#![no_main]

#[path = "../laws/classify.rs"]
mod laws;

libfuzzer_sys::fuzz_target!(|frame: &[u8]| laws::assert_all(frame));
