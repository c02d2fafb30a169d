//! Law of session tokens: of all tokens presented, only those made for this VM, this dialect and this moment are
//! valid.
//!
//! The fuzz target and the test that replays its corpus share this file. An input:
//!
//! | byte | meaning |
//! |---|---|
//! | 0 | low two bits: the dialect; next two bits: the VM |
//! | 1–4 | lifetime in seconds |
//! | 5–8 | seconds between making and presenting the token |
//! | 9 | number of edits that follow, three bytes each: position, byte, kind (0 overwrite, 1 insert, 2 delete, else flip a bit) |
//! | others | after the edits: a forged token |
#![cfg_attr(not(test), no_main)]

use metadata_content::token::{Keyring, TOKEN_CHARS, TokenKind};

const KINDS: [TokenKind; 3] = [TokenKind::Aws, TokenKind::AliYun, TokenKind::Akamai];
/// One name is a prefix of another and one is empty: the signed text must delimit the name.
const VMS: [&str; 4] =
    ["7c0f1a52-3b5e-4d1a-9d2c-000000000001", "7c0f1a52-3b5e-4d1a-9d2c-000000000002", "7c0f1a52", ""];
const MADE_AT: u64 = 1_767_225_600;
const EDITS_MOST: usize = 8;

/// Asserts every law on one input.
///
/// # Panics
/// If a law is broken; the message says which.
pub(crate) fn assert_all(input: &[u8]) {
    let Some((head, rest)) = input.split_first_chunk::<10>() else { return };
    let [who, t0, t1, t2, t3, a0, a1, a2, a3, edits] = *head;
    let kind = KINDS[usize::from(who & 3) % KINDS.len()];
    let vm = VMS[usize::from(who >> 2 & 3)];
    let ttl = u32::from_be_bytes([t0, t1, t2, t3]);
    let shown_at = MADE_AT + u64::from(u32::from_be_bytes([a0, a1, a2, a3]));
    let (edits, strange) = rest.split_at(rest.len().min(3 * usize::from(edits).min(EDITS_MOST)));

    // Each input gets new keys. With fixed keys a fuzzer could learn from comparisons and present a genuine token.
    let (keys, other_keys) = (Keyring::ephemeral(), Keyring::ephemeral());
    let token = keys.mint(kind, vm, ttl, MADE_AT);
    assert_eq!(token.len(), TOKEN_CHARS);
    assert!(token.bytes().all(|byte| byte.is_ascii_graphic()), "{token}");
    let ends = MADE_AT + u64::from(ttl.min(kind.longest_ttl_seconds()));
    assert_eq!(keys.verify(kind, vm, token.as_bytes(), shown_at), shown_at < ends, "{ttl} s at {shown_at}");
    for other in KINDS.into_iter().filter(|other| *other != kind) {
        assert!(!keys.verify(other, vm, token.as_bytes(), MADE_AT), "valid for {other:?}");
    }
    for other in VMS.into_iter().filter(|other| *other != vm) {
        assert!(!keys.verify(kind, other, token.as_bytes(), MADE_AT), "valid for the VM `{other}`");
    }
    assert!(!other_keys.verify(kind, vm, token.as_bytes(), MADE_AT), "valid on another node");

    let edited = edit(token.as_bytes(), edits);
    if edited != token.as_bytes() {
        assert_invalid(&keys, &edited);
    }
    assert_invalid(&keys, strange);
    if !strange.is_empty() {
        // Parts of a valid token do not help a forger.
        assert_invalid(&keys, &[token.as_bytes(), strange].concat());
        let spliced = [&token.as_bytes()[strange.len().min(TOKEN_CHARS)..], strange].concat();
        assert_invalid(&keys, &spliced);
    }
}

/// Asserts that a text is valid for no VM and no dialect.
fn assert_invalid(keys: &Keyring, text: &[u8]) {
    let made = |kind, vm| keys.verify(kind, vm, text, MADE_AT);
    for kind in KINDS {
        for vm in VMS {
            assert!(!made(kind, vm), "{} is valid for {kind:?} of `{vm}`", text.escape_ascii());
        }
    }
}

fn edit(token: &[u8], edits: &[u8]) -> Vec<u8> {
    let mut text = token.to_vec();
    for &[at, byte, how] in edits.as_chunks::<3>().0 {
        let at = usize::from(at) % text.len().max(1);
        match how {
            0 => text.splice(at..(at + 1).min(text.len()), [byte]).for_each(drop),
            1 => text.insert(at, byte),
            2 if !text.is_empty() => drop(text.remove(at)),
            _ => text.iter_mut().skip(at).take(1).for_each(|found| *found ^= 1 << (byte & 7)),
        }
    }
    text
}

#[cfg(not(test))]
libfuzzer_sys::fuzz_target!(|input: &[u8]| assert_all(input));
