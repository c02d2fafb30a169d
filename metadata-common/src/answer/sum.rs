//! The Internet checksum (RFC 1071), over values rather than memory.
//!
//! A guest with checksum offload leaves the sum of the pseudo-header alone in the field, folded and not complemented,
//! for the device to complete (virtio 1.2 §5.1.6.2, `CHECKSUM_PARTIAL` in Linux). Between a guest and its host
//! nobody completes it, and memory needs none.

/// Sum of a 32-bit field's halves.
#[inline(always)]
pub(super) const fn long(value: u32) -> u32 {
    (value >> 16) + (value & 0xffff)
}

/// Sum of an IPv6 address.
#[inline(always)]
pub(super) const fn address(octets: [u8; 16]) -> u32 {
    let value = u128::from_be_bytes(octets);
    long((value >> 96) as u32) + long((value >> 64) as u32) + long((value >> 32) as u32) + long(value as u32)
}

/// The sum of 16-bit words with its carries added back: at most 65,536 words.
#[inline(always)]
pub(super) const fn fold(sum: u32) -> u16 {
    let sum = (sum & 0xffff) + (sum >> 16);
    ((sum & 0xffff) + (sum >> 16)) as u16
}

/// What stands in the header: the complement.
#[inline(always)]
pub(super) const fn finish(sum: u32) -> [u8; 2] {
    (!fold(sum)).to_be_bytes()
}

/// True for a segment or message whose checksum is complete, or partial. `pseudo` is the sum of the pseudo-header,
/// `all` that of every word behind it, `field` among them.
#[inline(always)]
pub(super) const fn is_sound(pseudo: u32, all: u32, field: [u8; 2]) -> bool {
    u16::from_be_bytes(field) == fold(pseudo) || fold(pseudo + all) == 0xffff
}
