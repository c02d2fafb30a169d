//! Session tokens that nobody has to remember.
//!
//! A token says what it is for and when it ends, and carries a MAC over that and the VM it was made for. So
//! it is checked without a table, holds across restarts, and is worth nothing to another VM or dialect.
//!
//! ```text
//! version 1 │ kind 1 │ expiry, Unix seconds, big endian 8 │ nonce 8 │ HMAC-SHA-256, first 24 octets
//! ```
//!
//! 42 octets, in standard base64 (RFC 4648 §4) 56 characters without padding or newline: as long as those of
//! AWS. The MAC (RFC 2104) covers the first 18 octets and the VM's UUID as text.

#[cfg(test)]
mod tests;
mod text;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use hmac::{Hmac, KeyInit as _, Mac as _};
use sha2::Sha256;

/// Characters of a token.
pub const TOKEN_CHARS: usize = 56;
/// Shortest time between two rotations: the longest life of a token, since only one former key is kept.
pub const SHORTEST_ROTATION: Duration = Duration::from_secs(86_400);

const VERSION: u8 = 1;
const HEAD_OCTETS: usize = 18;
const TAG_OCTETS: usize = 24;
const TOKEN_OCTETS: usize = HEAD_OCTETS + TAG_OCTETS;
const KEY_OCTETS: usize = 32;

/// The dialect a token is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// EC2's IMDSv2.
    Aws = 1,
    /// Alibaba Cloud's hardened mode.
    AliYun = 2,
    /// Akamai (Linode).
    Akamai = 3,
}

impl Kind {
    /// The longest life of a token, in seconds.
    #[must_use]
    pub const fn longest_ttl_seconds(self) -> u32 {
        match self {
            Self::Aws | Self::AliYun => 21_600,
            Self::Akamai => 86_400,
        }
    }
}

/// One secret key, ready to use.
#[derive(Clone)]
struct Key {
    octets: [u8; KEY_OCTETS],
    /// The MAC after it took in the key, which a token need not do again.
    keyed: Hmac<Sha256>,
}

impl Key {
    fn new(octets: [u8; KEY_OCTETS]) -> Self {
        // A key shorter than the hash's block is filled up with zeros (RFC 2104 §2).
        let mut block = [0; 64];
        block[..KEY_OCTETS].copy_from_slice(&octets);
        Self { octets, keyed: Hmac::new(&block.into()) }
    }

    /// From the thread's generator: ChaCha seeded by the kernel, which asks it for no more than a seed.
    fn random() -> Self {
        Self::new(rand::random())
    }

    fn mac(&self, head: &[u8], vm: &str) -> Hmac<Sha256> {
        self.keyed.clone().chain_update(head).chain_update(vm.as_bytes())
    }
}

/// The key in use, and the one before it. No `Debug`: these are the keys.
#[derive(Clone)]
pub struct Keys {
    current: Key,
    /// When `current` began and `previous` ended, in Unix seconds.
    since_unix: u64,
    previous: Option<Key>,
}

impl Keys {
    /// A new key, and none before it, from `now_unix` on (Unix seconds).
    #[must_use]
    pub fn new(now_unix: u64) -> Self {
        Self { current: Key::random(), since_unix: now_unix, previous: None }
    }

    /// A new key from `now_unix` on. Tokens of the current one stay good until they expire; those of the one before end.
    #[must_use]
    pub fn rotated(&self, now_unix: u64) -> Self {
        Self { current: Key::random(), since_unix: now_unix, previous: Some(self.current.clone()) }
    }

    /// The former key, while tokens it signed may live.
    fn overlapping(&self, kind: Kind, now_unix: u64) -> Option<&Key> {
        let age = now_unix.saturating_sub(self.since_unix);
        self.previous.as_ref().filter(|_| age < u64::from(kind.longest_ttl_seconds()))
    }

    /// True when the current key is at least `age` old, which is taken as [`SHORTEST_ROTATION`] at least.
    #[must_use]
    pub fn older_than(&self, age: Duration, now_unix: u64) -> bool {
        now_unix.saturating_sub(self.since_unix) >= age.max(SHORTEST_ROTATION).as_secs()
    }
}

/// Makes and checks tokens. Shared by reference; readers never wait, also not for a rotation.
pub struct Keyring {
    keys: ArcSwap<Keys>,
}

impl fmt::Debug for Keyring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Keyring(…)")
    }
}

impl Keyring {
    /// A key in memory only: its tokens end with the process.
    #[must_use]
    pub fn ephemeral() -> Self {
        Self { keys: ArcSwap::from_pointee(Keys::new(0)) }
    }

    /// A ring of these keys.
    #[must_use]
    pub fn with(keys: Keys) -> Self {
        Self { keys: ArcSwap::from_pointee(keys) }
    }

    /// Puts other keys in the place of those before.
    pub fn set(&self, keys: Keys) {
        self.keys.store(Arc::new(keys));
    }

    /// A token of `kind` for the VM with this UUID, good for `ttl_seconds`, the kind's longest at most.
    ///
    /// [`TOKEN_CHARS`] characters, all of them fit for a header's value.
    #[must_use]
    pub fn mint(&self, kind: Kind, vm: &str, ttl_seconds: u32, now_unix: u64) -> String {
        let expiry = now_unix.saturating_add(ttl_seconds.min(kind.longest_ttl_seconds()).into());
        let mut token = [0; TOKEN_OCTETS];
        token[0] = VERSION;
        token[1] = kind as u8;
        token[2..10].copy_from_slice(&expiry.to_be_bytes());
        token[10..HEAD_OCTETS].copy_from_slice(&rand::random::<[u8; 8]>());
        let tag = self.keys.load().current.mac(&token[..HEAD_OCTETS], vm).finalize().into_bytes();
        token[HEAD_OCTETS..].copy_from_slice(&tag[..TAG_OCTETS]);
        STANDARD.encode(token)
    }

    /// True for a token of this `kind`, made for the VM with this UUID, that has not ended.
    ///
    /// The MAC is compared in constant time. After a rotation the former key counts for as long as the
    /// longest-lived token of the kind.
    #[must_use]
    pub fn verify(&self, kind: Kind, vm: &str, token: &[u8], now_unix: u64) -> bool {
        let mut octets = [0; TOKEN_OCTETS];
        if token.len() != TOKEN_CHARS || STANDARD.decode_slice(token, &mut octets) != Ok(TOKEN_OCTETS) {
            return false;
        }
        let (head, tag) = octets.split_at(HEAD_OCTETS);
        let expiry = head[2..10].iter().fold(0, |sum, octet| sum << 8 | u64::from(*octet));
        if head[0] != VERSION || head[1] != kind as u8 || expiry <= now_unix {
            return false;
        }
        let keys = self.keys.load();
        let signed = |key: &Key| key.mac(head, vm).verify_truncated_left(tag).is_ok();
        signed(&keys.current) || keys.overlapping(kind, now_unix).is_some_and(signed)
    }
}
