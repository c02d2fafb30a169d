//! Checks the law of session tokens on genuine, edited and forged tokens.
#![no_main]

#[path = "../laws/token.rs"]
mod laws;

libfuzzer_sys::fuzz_target!(|input: &[u8]| laws::assert_all(input));
