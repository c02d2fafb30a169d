//! Frames from the wire into the stack, and everything that may happen between them.
#![no_main]

#[path = "../laws/frames.rs"]
mod laws;

libfuzzer_sys::fuzz_target!(|input: &[u8]| laws::assert_all(input));
