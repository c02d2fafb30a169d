//! Checks the laws of subjects, key sets and the signer's packets.
#![no_main]

#[path = "../laws/identity.rs"]
mod laws;

libfuzzer_sys::fuzz_target!(|input: &[u8]| laws::assert_all(input));
