//! Cuts long frames into segments, as a kernel or a guest's driver does (Linux: `tcp_gso_segment`).

use metadata_datapath::stack::Long;
use smoltcp::wire::{Ipv4Packet, Ipv6Packet, TcpPacket};

const ETHERNET: usize = 14;

/// The frames of all segments, with complete checksums.
///
/// # Panics
/// If the frame is malformed: a wrong offset, a short length, a checksum that is not the pseudo-header's sum, or too
/// much payload for one IP packet.
#[must_use]
pub fn cut(long: &Long<'_>) -> Vec<Vec<u8>> {
    let payload: Vec<u8> = long.payload.iter().flat_map(|piece| piece.iter().copied()).collect();
    let tcp_at = usize::from(long.tcp_at);
    assert_eq!(tcp_at, ETHERNET + if long.is_ipv4 { 20 } else { 40 });
    let whole = [long.headers, &payload].concat();
    assert!(whole.len() < 65_536, "the kernel cuts frames of {} bytes itself", whole.len());
    assert_partial(&whole, tcp_at, long.is_ipv4);
    let segments = payload.chunks(long.segment.into());
    let last = segments.len() - 1;
    let first = TcpPacket::new_checked(&whole[tcp_at..]).expect("a TCP segment").seq_number();
    segments
        .enumerate()
        .map(|(n, part)| {
            let mut frame = [long.headers, part].concat();
            let length = frame.len();
            let mut tcp = TcpPacket::new_unchecked(&mut frame[tcp_at..]);
            tcp.set_seq_number(first + n * usize::from(long.segment));
            if n < last {
                tcp.set_fin(false);
                tcp.set_psh(false);
            }
            if long.is_ipv4 {
                let mut ip = Ipv4Packet::new_unchecked(&mut frame[ETHERNET..]);
                ip.set_total_len((length - ETHERNET) as u16);
                ip.fill_checksum();
                let (from, to) = (ip.src_addr(), ip.dst_addr());
                TcpPacket::new_unchecked(ip.payload_mut()).fill_checksum(&from.into(), &to.into());
            } else {
                let mut ip = Ipv6Packet::new_unchecked(&mut frame[ETHERNET..]);
                ip.set_payload_len((length - tcp_at) as u16);
                let (from, to) = (ip.src_addr(), ip.dst_addr());
                TcpPacket::new_unchecked(ip.payload_mut()).fill_checksum(&from.into(), &to.into());
            }
            frame
        })
        .collect()
}

/// Asserts that the length and the checksum are those of the whole: the latter is the sum of the pseudo-header.
fn assert_partial(whole: &[u8], tcp_at: usize, is_ipv4: bool) {
    let length = whole.len() - tcp_at;
    let addresses = if is_ipv4 {
        let ip = Ipv4Packet::new_checked(&whole[ETHERNET..]).expect("an IPv4 packet");
        assert!(ip.verify_checksum() && usize::from(ip.total_len()) == whole.len() - ETHERNET);
        &whole[ETHERNET + 12..ETHERNET + 20]
    } else {
        let ip = Ipv6Packet::new_checked(&whole[ETHERNET..]).expect("an IPv6 packet");
        assert_eq!(usize::from(ip.payload_len()), length);
        &whole[ETHERNET + 8..ETHERNET + 40]
    };
    let words = addresses.chunks(2).map(|word| u32::from(word[0]) << 8 | u32::from(word[1]));
    let mut sum = words.sum::<u32>() + 6 + length as u32;
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    let field = u16::from_be_bytes([whole[tcp_at + 16], whole[tcp_at + 17]]);
    assert_eq!(u32::from(field), sum, "the sum of the pseudo-header");
}
