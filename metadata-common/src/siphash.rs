//! SipHash-1-3 (J.-P. Aumasson, D. J. Bernstein, *SipHash: a fast short-input PRF*), word by word, so that kernel programs
//! can compute it.
//!
//! It is for what tenants choose and somebody else relies on: without the key nobody finds two messages with one hash.

/// A secret key: two random words.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct SipKey(pub [u64; 2]);

/// Omits the words, because they suffice to find collisions.
impl core::fmt::Debug for SipKey {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("SipKey")
    }
}

/// The state of a hash.
#[derive(Clone, Copy)]
pub(crate) struct SipHash13 {
    v0: u64,
    v1: u64,
    v2: u64,
    v3: u64,
}

impl SipHash13 {
    #[inline(always)]
    pub(crate) const fn new(SipKey([k0, k1]): &SipKey) -> Self {
        Self {
            v0: *k0 ^ 0x736f_6d65_7073_6575,
            v1: *k1 ^ 0x646f_7261_6e64_6f6d,
            v2: *k0 ^ 0x6c79_6765_6e65_7261,
            v3: *k1 ^ 0x7465_6462_7974_6573,
        }
    }

    /// Adds eight bytes of the message, in little-endian order.
    #[inline(always)]
    pub(crate) const fn add(&mut self, word: u64) {
        self.v3 ^= word;
        self.round();
        self.v0 ^= word;
    }

    /// Ends a message of `length` bytes. `rest` has its last bytes, of which there are fewer than eight, and zeros after
    /// them.
    #[inline(always)]
    pub(crate) const fn end(mut self, rest: u64, length: usize) -> u64 {
        self.add(rest | (length as u64) << 56);
        self.v2 ^= 0xff;
        self.round();
        self.round();
        self.round();
        self.v0 ^ self.v1 ^ self.v2 ^ self.v3
    }

    #[inline(always)]
    const fn round(&mut self) {
        self.v0 = self.v0.wrapping_add(self.v1);
        self.v2 = self.v2.wrapping_add(self.v3);
        self.v1 = self.v1.rotate_left(13) ^ self.v0;
        self.v3 = self.v3.rotate_left(16) ^ self.v2;
        self.v0 = self.v0.rotate_left(32);
        self.v2 = self.v2.wrapping_add(self.v1);
        self.v0 = self.v0.wrapping_add(self.v3);
        self.v1 = self.v1.rotate_left(17) ^ self.v2;
        self.v3 = self.v3.rotate_left(21) ^ self.v0;
        self.v2 = self.v2.rotate_left(32);
    }
}
