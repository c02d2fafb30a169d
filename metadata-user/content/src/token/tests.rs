use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use proptest::prelude::*;

use super::{Keyring, TOKEN_CHARS, TokenKeys, TokenKind};

const VM: &str = "7c0f1a52-3b5e-4d1a-9d2c-0f5e8a1b2c3d";
const OTHER_VM: &str = "7c0f1a52-3b5e-4d1a-9d2c-0f5e8a1b2c3e";
const KINDS: [TokenKind; 3] = [TokenKind::Aws, TokenKind::AliYun, TokenKind::Akamai];
const NOW: u64 = 1_790_000_000;

#[test]
fn a_token_has_the_documented_form() {
    let token = Keyring::ephemeral().mint(TokenKind::AliYun, VM, 60, NOW);
    assert_eq!(token.len(), TOKEN_CHARS);
    let bytes = STANDARD.decode(&token).expect("base64");
    assert_eq!(bytes.len(), 42);
    assert_eq!(bytes[..2], [1, 2]);
    assert_eq!(bytes[2..10], (NOW + 60).to_be_bytes());
    assert!(token.bytes().all(|b| b.is_ascii_graphic()));
}

#[test]
fn a_token_made_elsewhere_in_the_documented_form_is_accepted() {
    // Made with Python's hmac: the key is the bytes 0 to 31, the nonce 1 to 8, the expiry NOW + 60.
    const KEY: &str = "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";
    const TOKEN: &[u8; TOKEN_CHARS] = b"AQMAAAAAarE7vAECAwQFBgcICNh7cL9xTgVOVBvj7TiD6OBCKx0GG7SZ";
    let text =
        format!(r#"{{"form":"xdp-imds token keys 1","since_unix":{NOW},"current":"{KEY}","previous":null}}"#);
    let keyring = Keyring::with(TokenKeys::parse(text.as_bytes()).expect("keys"));
    assert!(keyring.verify(TokenKind::Akamai, VM, TOKEN, NOW + 59));
    assert!(!keyring.verify(TokenKind::Akamai, VM, TOKEN, NOW + 60));
}

#[test]
fn no_two_tokens_are_equal() {
    let keyring = Keyring::ephemeral();
    let tokens: std::collections::HashSet<_> =
        (0..1_000).map(|_| keyring.mint(TokenKind::Aws, VM, 60, NOW)).collect();
    assert_eq!(tokens.len(), 1_000);
}

#[test]
fn no_token_outlives_the_maximum_lifetime_of_its_kind() {
    let keyring = Keyring::ephemeral();
    for kind in KINDS {
        let token = keyring.mint(kind, VM, u32::MAX, NOW);
        let end = NOW + u64::from(kind.longest_ttl_seconds());
        assert!(keyring.verify(kind, VM, token.as_bytes(), end - 1), "{kind:?}");
        assert!(!keyring.verify(kind, VM, token.as_bytes(), end), "{kind:?}");
    }
}

#[test]
fn anything_but_a_token_is_refused() {
    let keyring = Keyring::ephemeral();
    let token = keyring.mint(TokenKind::Aws, VM, 60, NOW);
    let zeros = "A".repeat(TOKEN_CHARS);
    let longer = format!("{token}\n");
    for wrong in ["", &token[1..], &token[..55], &longer, &zeros, &"é".repeat(28)] {
        assert!(!keyring.verify(TokenKind::Aws, VM, wrong.as_bytes(), NOW), "{wrong:?}");
    }
    assert!(
        !Keyring::ephemeral().verify(TokenKind::Aws, VM, token.as_bytes(), NOW),
        "another keyring has another key"
    );
}

proptest! {
    #[test]
    fn a_token_is_valid_for_its_vm_and_kind_until_it_expires(
        kind in 0_usize..3, other in 1_usize..3, ttl in 1_u32..=21_600, now in 0_u64..1 << 40, late in 0_u64..1 << 40,
    ) {
        let keyring = Keyring::ephemeral();
        let (kind, other) = (KINDS[kind], KINDS[(kind + other) % 3]);
        let token = keyring.mint(kind, VM, ttl, now);
        let end = now + u64::from(ttl);
        prop_assert!(keyring.verify(kind, VM, token.as_bytes(), now));
        prop_assert!(keyring.verify(kind, VM, token.as_bytes(), end - 1));
        prop_assert!(!keyring.verify(kind, VM, token.as_bytes(), end + late));
        prop_assert!(!keyring.verify(other, VM, token.as_bytes(), now));
        prop_assert!(!keyring.verify(kind, OTHER_VM, token.as_bytes(), now));
    }

    #[test]
    fn every_flipped_bit_is_refused(kind in 0_usize..3, ttl in 1_u32..=21_600) {
        let keyring = Keyring::ephemeral();
        let kind = KINDS[kind];
        let token = keyring.mint(kind, VM, ttl, NOW).into_bytes();
        for bit in 0..token.len() * 8 {
            let mut flipped = token.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            prop_assert!(!keyring.verify(kind, VM, &flipped, NOW), "bit {bit} of the text");
        }
        let bytes = STANDARD.decode(&token).expect("base64");
        for bit in 0..bytes.len() * 8 {
            let mut flipped = bytes.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            prop_assert!(!keyring.verify(kind, VM, STANDARD.encode(flipped).as_bytes(), NOW), "bit {bit}");
        }
    }
}

#[test]
fn debug_output_contains_no_key() {
    let keyring = Keyring::ephemeral();
    assert_eq!(format!("{keyring:?}"), "Keyring(…)");
}
