//! Compares the kernel's answer with user space's for any frame.
#![no_main]

#[path = "../laws/answer.rs"]
mod laws;

libfuzzer_sys::fuzz_target!(|input: &[u8]| laws::assert_all(input));
