//! Checks the laws of the path from the wire to the stack on any sequence of frames and events.
#![no_main]

#[path = "../laws/frames.rs"]
mod laws;

libfuzzer_sys::fuzz_target!(|input: &[u8]| laws::assert_all(input));
