//! The Internet checksum (RFC 1071), over values rather than memory.
//!
//! A guest with checksum offload leaves only the folded sum of the pseudo-header in the field, not
//! complemented; the device completes it (virtio 1.2 §5.1.6.2, `CHECKSUM_PARTIAL` in Linux). Between a guest
//! and its host no device completes it, because frames in memory need no checksum.

/// The sum of both halves of a 32-bit value.
#[inline(always)]
pub(super) const fn long(value: u32) -> u32 {
    (value >> 16) + (value & 0xffff)
}

/// The sum of the 16-bit words of an IPv6 address.
#[inline(always)]
pub(super) const fn address(bytes: [u8; 16]) -> u32 {
    let value = u128::from_be_bytes(bytes);
    long((value >> 96) as u32) + long((value >> 64) as u32) + long((value >> 32) as u32) + long(value as u32)
}

/// Folds a sum of at most 65,536 words to 16 bits by adding the carries back.
#[inline(always)]
pub(super) const fn fold(sum: u32) -> u16 {
    let sum = (sum & 0xffff) + (sum >> 16);
    ((sum & 0xffff) + (sum >> 16)) as u16
}

/// The checksum field: the complement of the folded sum.
#[inline(always)]
pub(super) const fn finish(sum: u32) -> [u8; 2] {
    (!fold(sum)).to_be_bytes()
}

/// True if the checksum is complete or partial. `pseudo` is the sum of the pseudo-header; `all` is the sum of
/// every word after it, including `field`.
#[inline(always)]
pub(super) const fn is_sound(pseudo: u32, all: u32, field: [u8; 2]) -> bool {
    u16::from_be_bytes(field) == fold(pseudo) || fold(pseudo + all) == 0xffff
}
