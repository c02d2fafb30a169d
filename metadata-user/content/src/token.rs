//! Stateless session tokens.
//!
//! A token contains its dialect, its expiry, and a MAC over these and the VM. So the agent checks a token without a
//! table, accepts it after a restart, and refuses it from another VM or for another dialect.
//!
//! ```text
//! version 1 │ kind 1 │ expiry, Unix seconds, big endian 8 │ nonce 8 │ HMAC-SHA-256, first 24 bytes
//! ```
//!
//! These 42 bytes are 56 characters of standard base64 (RFC 4648 §4) without padding or newline, the length of AWS's
//! tokens. The MAC (RFC 2104) covers the first 18 bytes and the text of the VM's owner.

use arc_swap::{ArcSwap, Guard};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use hmac::{Hmac, KeyInit as _, Mac as _};
use serde::{Deserialize, Serialize};
use sha2::Sha256;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// Length of a token, in characters.
pub const TOKEN_CHARS: usize = 56;
/// Minimum time between two key rotations: the longest lifetime of a token, because only one former key is kept.
pub const SHORTEST_ROTATION: Duration = Duration::from_secs(86_400);

/// How far the node's clock may have stepped back before tokens and keys from the time ahead are no longer trusted, in
/// seconds. Without a limit, a token or key made while the clock was years ahead would stay in use for years.
pub const CLOCK_BACK_SECONDS: u64 = 86_400;

const VERSION: u8 = 1;
const HEAD_BYTES: usize = 18;
const TAG_BYTES: usize = 24;
const TOKEN_BYTES: usize = HEAD_BYTES + TAG_BYTES;
const KEY_BYTES: usize = 32;

/// The dialect a token is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TokenKind {
    /// EC2's IMDSv2.
    Aws = 1,
    /// Alibaba Cloud's hardened mode.
    AliYun = 2,
    /// Akamai (Linode).
    Akamai = 3,
}

impl TokenKind {
    /// All kinds.
    pub const ALL: [Self; 3] = [Self::Aws, Self::AliYun, Self::Akamai];

    /// Returns the name of the header field that has the token.
    #[must_use]
    pub const fn field(self) -> &'static str {
        match self {
            Self::Aws => "X-aws-ec2-metadata-token",
            Self::AliYun => "X-aliyun-ecs-metadata-token",
            Self::Akamai => "Metadata-Token",
        }
    }

    /// Returns the maximum lifetime of a token, in seconds.
    #[must_use]
    pub const fn longest_ttl_seconds(self) -> u32 {
        match self {
            Self::Aws | Self::AliYun => 21_600,
            Self::Akamai => 86_400,
        }
    }
}

/// One secret key with its prepared MAC.
#[derive(Clone)]
struct Key {
    bytes: [u8; KEY_BYTES],
    /// MAC state after the key block. Keeping it saves that step for each token.
    keyed: Hmac<Sha256>,
}

impl Key {
    fn new(bytes: [u8; KEY_BYTES]) -> Self {
        // HMAC pads a key shorter than the hash's block with zeros (RFC 2104 §2).
        let mut block = [0; 64];
        block[..KEY_BYTES].copy_from_slice(&bytes);
        Self { bytes, keyed: Hmac::new(&block.into()) }
    }

    /// Draws a key from the thread's generator (ChaCha, seeded by the kernel).
    fn random() -> Self {
        Self::new(rand::random())
    }

    fn mac(&self, head: &[u8], vm: &str) -> Hmac<Sha256> {
        self.keyed.clone().chain_update(head).chain_update(vm.as_bytes())
    }
}

/// The current key and the former one. It has no `Debug`, because the keys are secret.
#[derive(Clone)]
pub struct TokenKeys {
    current: Key,
    /// Time when `current` replaced `previous`, in Unix seconds.
    since_unix: u64,
    previous: Option<Key>,
}

impl TokenKeys {
    /// Creates a random current key, valid from `now_unix` (Unix seconds), and no former key.
    #[must_use]
    pub fn new(now_unix: u64) -> Self {
        Self { current: Key::random(), since_unix: now_unix, previous: None }
    }

    /// Returns the keys after a rotation at `now_unix`. Tokens of the current key stay valid until they expire, and
    /// tokens of the former key become invalid.
    #[must_use]
    pub fn rotated(&self, now_unix: u64) -> Self {
        Self { current: Key::random(), since_unix: now_unix, previous: Some(self.current.clone()) }
    }

    /// Returns the former key while tokens that it signed may still be valid.
    fn overlapping(&self, kind: TokenKind, now_unix: u64) -> Option<&Key> {
        let age = now_unix.saturating_sub(self.since_unix);
        self.previous
            .as_ref()
            .filter(|_| age < u64::from(kind.longest_ttl_seconds()) && !self.is_ahead(now_unix))
    }

    /// Returns whether the current key is at least as old as the larger of `age` and [`SHORTEST_ROTATION`], or was made
    /// while the clock was far ahead. Otherwise it would not be replaced before the clock is there again.
    #[must_use]
    pub fn older_than(&self, age: Duration, now_unix: u64) -> bool {
        self.is_ahead(now_unix)
            || now_unix.saturating_sub(self.since_unix) >= age.max(SHORTEST_ROTATION).as_secs()
    }

    /// Returns whether the current key was made while the clock was more than [`CLOCK_BACK_SECONDS`] ahead.
    fn is_ahead(&self, now_unix: u64) -> bool {
        self.since_unix > now_unix.saturating_add(CLOCK_BACK_SECONDS)
    }
}

/// The keys that a keyring used at some time. It has no `Debug`, because the keys are secret.
#[derive(Clone)]
pub struct KeysInUse(Arc<TokenKeys>);

impl KeysInUse {
    /// Returns the keys.
    #[must_use]
    pub fn keys(&self) -> TokenKeys {
        TokenKeys::clone(&self.0)
    }
}

/// Issues and checks tokens. Neither waits, not even for a rotation.
pub struct Keyring {
    keys: ArcSwap<TokenKeys>,
}

impl fmt::Debug for Keyring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Keyring(…)")
    }
}

impl Keyring {
    /// Creates a keyring in memory only: its tokens become invalid when the process ends.
    #[must_use]
    pub fn ephemeral() -> Self {
        Self { keys: ArcSwap::from_pointee(TokenKeys::new(0)) }
    }

    /// Creates a keyring with these keys.
    #[must_use]
    pub fn with(keys: TokenKeys) -> Self {
        Self { keys: ArcSwap::from_pointee(keys) }
    }

    /// Returns the keys.
    #[must_use]
    pub fn keys(&self) -> TokenKeys {
        TokenKeys::clone(&self.keys.load())
    }

    /// Returns the keys that are in use now, to tell later whether they still are.
    #[must_use]
    pub fn in_use(&self) -> KeysInUse {
        KeysInUse(self.keys.load_full())
    }

    /// Returns whether no other keys were set since.
    #[must_use]
    pub fn still_uses(&self, keys: &KeysInUse) -> bool {
        Arc::ptr_eq(&self.keys.load_full(), &keys.0)
    }

    /// Replaces the keys, unless other keys were set since. Returns whether it did.
    pub fn replace(&self, former: &KeysInUse, keys: TokenKeys) -> bool {
        let found = self.keys.compare_and_swap(&former.0, Arc::new(keys));
        Arc::ptr_eq(&Guard::into_inner(found), &former.0)
    }

    /// Replaces the keys.
    pub fn set(&self, keys: TokenKeys) {
        self.keys.store(Arc::new(keys));
    }

    /// Issues a token of `kind` for the VM of this owner. It is valid for `ttl_seconds`, at most the kind's maximum.
    ///
    /// The token has [`TOKEN_CHARS`] characters, all of them allowed in a header value.
    #[must_use]
    pub fn mint(&self, kind: TokenKind, vm: &str, ttl_seconds: u32, now_unix: u64) -> String {
        let expiry = now_unix.saturating_add(ttl_seconds.min(kind.longest_ttl_seconds()).into());
        let mut token = [0; TOKEN_BYTES];
        token[0] = VERSION;
        token[1] = kind as u8;
        token[2..10].copy_from_slice(&expiry.to_be_bytes());
        token[10..HEAD_BYTES].copy_from_slice(&rand::random::<[u8; 8]>());
        let tag = self.keys.load().current.mac(&token[..HEAD_BYTES], vm).finalize().into_bytes();
        token[HEAD_BYTES..].copy_from_slice(&tag[..TAG_BYTES]);
        STANDARD.encode(token)
    }

    /// Returns whether the token is of this `kind`, was issued for the VM of this owner, and has not expired. A token
    /// from a time when the clock was more than [`CLOCK_BACK_SECONDS`] ahead is refused.
    ///
    /// The MAC is compared in constant time. After a rotation the former key stays valid for the maximum lifetime of
    /// the kind.
    #[must_use]
    pub fn verify(&self, kind: TokenKind, vm: &str, token: &[u8], now_unix: u64) -> bool {
        self.expiry(kind, vm, token, now_unix).is_some()
    }

    /// Returns when a token that [is valid](Self::verify) expires, in Unix seconds; `None` for any other.
    #[must_use]
    pub fn expiry(&self, kind: TokenKind, vm: &str, token: &[u8], now_unix: u64) -> Option<u64> {
        let mut bytes = [0; TOKEN_BYTES];
        if token.len() != TOKEN_CHARS || STANDARD.decode_slice(token, &mut bytes) != Ok(TOKEN_BYTES) {
            return None;
        }
        let (head, tag) = bytes.split_at(HEAD_BYTES);
        let expiry = head[2..10].iter().fold(0, |sum, byte| sum << 8 | u64::from(*byte));
        let latest = now_unix.saturating_add(u64::from(kind.longest_ttl_seconds()) + CLOCK_BACK_SECONDS);
        if head[0] != VERSION || head[1] != kind as u8 || expiry <= now_unix || expiry > latest {
            return None;
        }
        let keys = self.keys.load();
        let signed = |key: &Key| key.mac(head, vm).verify_truncated_left(tag).is_ok();
        let is_signed = signed(&keys.current) || keys.overlapping(kind, now_unix).is_some_and(signed);
        is_signed.then_some(expiry)
    }
}

// The text of a key file: JSON with the current key, its start time, and the former key.

/// What precedes the version in the field `form`.
const FORM: &str = "xdp-imds token keys ";

/// Content of the file. It has no `Debug`, because the keys are secret.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Text {
    form: String,
    since_unix: u64,
    current: String,
    previous: Option<String>,
}

impl TokenKeys {
    /// The version of the file format.
    pub const VERSION: u32 = 1;

    /// The version of a key file; `None` if the text is not a key file.
    #[must_use]
    pub fn version_of(text: &[u8]) -> Option<u32> {
        #[derive(Deserialize)]
        struct Head<'a> {
            form: &'a str,
        }
        serde_json::from_slice::<Head<'_>>(text).ok()?.form.strip_prefix(FORM)?.parse().ok()
    }

    /// Parses the text of a key file; `None` if it is malformed.
    #[must_use]
    pub fn parse(text: &[u8]) -> Option<Self> {
        if Self::version_of(text)? != Self::VERSION {
            return None;
        }
        let text: Text = serde_json::from_slice(text).ok()?;
        let previous = match &text.previous {
            Some(previous) => Some(key(previous)?),
            None => None,
        };
        Some(Self { current: key(&text.current)?, since_unix: text.since_unix, previous })
    }

    /// Returns the text of a key file, which is as secret as the keys.
    #[must_use]
    pub fn text(&self) -> String {
        let text = Text {
            form: format!("{FORM}{}", Self::VERSION),
            since_unix: self.since_unix,
            current: STANDARD.encode(self.current.bytes),
            previous: self.previous.as_ref().map(|key| STANDARD.encode(key.bytes)),
        };
        serde_json::to_string(&text).expect("strings and numbers are JSON")
    }
}

fn key(text: &str) -> Option<Key> {
    let bytes: [u8; KEY_BYTES] = STANDARD.decode(text).ok()?.try_into().ok()?;
    Some(Key::new(bytes))
}

#[cfg(test)]
mod tests {
    use base64::Engine as _;
    use base64::engine::general_purpose::STANDARD;
    use proptest::prelude::*;

    use super::{Keyring, TOKEN_CHARS, TokenKeys, TokenKind};

    const VM: &str = "7c0f1a52-3b5e-4d1a-9d2c-0f5e8a1b2c3d";
    const OTHER_VM: &str = "7c0f1a52-3b5e-4d1a-9d2c-0f5e8a1b2c3e";
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
        let text = format!(
            r#"{{"form":"xdp-imds token keys 1","since_unix":{NOW},"current":"{KEY}","previous":null}}"#
        );
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
        for kind in TokenKind::ALL {
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
            let (kind, other) = (TokenKind::ALL[kind], TokenKind::ALL[(kind + other) % 3]);
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
            let kind = TokenKind::ALL[kind];
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
}
