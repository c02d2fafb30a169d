//! The Internet checksum (RFC 1071), four bytes at a time, in the machine's own byte order (§2(B)).

/// Adds bytes to a sum. All parts but the last must have an even length.
pub(super) fn add(sum: u64, bytes: &[u8]) -> u64 {
    let (words, rest) = bytes.as_chunks::<4>();
    let mut sum = words.iter().fold(sum, |sum, word| sum + u64::from(u32::from_ne_bytes(*word)));
    if let [first, second, ..] = *rest {
        sum += u64::from(u16::from_ne_bytes([first, second]));
    }
    if rest.len() % 2 == 1 {
        sum += u64::from(u16::from_ne_bytes([rest[rest.len() - 1], 0]));
    }
    sum
}

/// Returns the sum in 16 bits, with carries added.
pub(super) fn folded(sum: u64) -> u16 {
    let sum = (sum >> 32) + (sum & 0xffff_ffff);
    let sum = (sum >> 32) + (sum & 0xffff_ffff);
    let sum = (sum >> 16) + (sum & 0xffff);
    let sum = (sum >> 16) + (sum & 0xffff);
    ((sum >> 16) + (sum & 0xffff)) as u16
}

/// Whether a sum over data and checksum shows undamaged data.
pub(super) fn good(sum: u64) -> bool {
    folded(sum) == 0xffff
}

#[cfg(test)]
mod tests {
    use super::{add, folded, good};

    #[test]
    fn the_example_of_rfc_1071_gives_its_sum() {
        let bytes = [0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7];
        assert_eq!(folded(add(0, &bytes)).to_ne_bytes(), [0xdd, 0xf2]);
    }

    #[test]
    fn sums_of_any_length_agree_with_word_by_word_addition() {
        let bytes: Vec<u8> = (0..=255).cycle().take(1_500).map(|n: u8| n.wrapping_mul(37)).collect();
        for len in [0, 1, 2, 3, 4, 5, 7, 8, 20, 1_459, 1_460] {
            let mut plain = 0u32;
            for pair in bytes[..len].chunks(2) {
                plain += u32::from(u16::from_be_bytes([pair[0], pair.get(1).copied().unwrap_or(0)]));
                plain = (plain >> 16) + (plain & 0xffff);
            }
            assert_eq!(folded(add(0, &bytes[..len])).to_ne_bytes(), (plain as u16).to_be_bytes(), "{len}");
        }
    }

    #[test]
    fn a_checksum_in_place_makes_all_ones() {
        let mut packet = [0x45, 0, 0, 40, 1, 2, 0x40, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2];
        let check = !folded(add(0, &packet));
        packet[10..12].copy_from_slice(&check.to_ne_bytes());
        assert!(good(add(0, &packet)));
        packet[3] ^= 1;
        assert!(!good(add(0, &packet)));
    }
}
