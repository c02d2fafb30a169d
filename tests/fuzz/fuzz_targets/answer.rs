//! Any frame, answered by the kernel and by user space.
#![no_main]

#[path = "../laws/answer.rs"]
mod laws;

libfuzzer_sys::fuzz_target!(|input: &[u8]| laws::assert_all(input));
