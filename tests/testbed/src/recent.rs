//! The last TCP segments of a wire, to explain a stalled connection.

use smoltcp::wire::{IpProtocol, Ipv4Packet, TcpPacket};
use std::collections::VecDeque;
use std::fmt;
use std::time::Duration;

/// Number of segments to keep: enough for five retransmissions, their cause and their acknowledgements.
pub const KEPT: usize = 32;
/// Bytes of an Ethernet header.
const ETHERNET: usize = 14;

/// Direction of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Towards {
    /// To the hypervisor.
    Host,
    /// To the guest.
    Guest,
}

/// Outcome of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It was delivered.
    Delivered,
    /// A simulated fault dropped it.
    Lost,
    /// The far end refused it.
    Refused,
}

/// A recorded segment.
#[derive(Clone, Copy, Debug)]
struct Seen {
    at: Duration,
    towards: Towards,
    fate: Fate,
    ports: (u16, u16),
    seq: u32,
    ack: u32,
    flags: (bool, bool, bool),
    payload: usize,
    window: u16,
}

impl fmt::Display for Seen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (syn, fin, reset) = self.flags;
        let flag = |is_set, name| if is_set { name } else { "" };
        write!(
            f,
            "{:.6} {} {}>{}{}{}{} seq {} ack {} len {} win {}{}",
            self.at.as_secs_f64(),
            if self.towards == Towards::Host { "guest" } else { "host " },
            self.ports.0,
            self.ports.1,
            flag(syn, " SYN"),
            flag(fin, " FIN"),
            flag(reset, " RST"),
            self.seq,
            self.ack,
            self.payload,
            self.window,
            match self.fate {
                Fate::Delivered => "",
                Fate::Lost => " LOST",
                Fate::Refused => " REFUSED",
            }
        )
    }
}

/// The last segments of one wire, and the number of frames that its simulated faults dropped.
#[derive(Clone, Debug, Default)]
pub struct Recent {
    seen: VecDeque<Seen>,
    /// Frames of any kind that the faults dropped.
    pub lost: u64,
}

impl Recent {
    /// Records an Ethernet frame; only TCP over IPv4 is kept.
    pub fn note(&mut self, at: Duration, towards: Towards, fate: Fate, frame: &[u8]) {
        self.lost += u64::from(fate == Fate::Lost);
        let ip = frame.get(ETHERNET..).and_then(|packet| Ipv4Packet::new_checked(packet).ok());
        let Some(ip) = ip.filter(|ip| ip.next_header() == IpProtocol::Tcp) else { return };
        let Ok(tcp) = TcpPacket::new_checked(ip.payload()) else { return };
        if self.seen.len() == KEPT {
            self.seen.pop_front();
        }
        self.seen.push_back(Seen {
            at,
            towards,
            fate,
            ports: (tcp.src_port(), tcp.dst_port()),
            seq: tcp.seq_number().0.cast_unsigned(),
            ack: tcp.ack_number().0.cast_unsigned(),
            flags: (tcp.syn(), tcp.fin(), tcp.rst()),
            payload: tcp.payload().len(),
            window: tcp.window_len(),
        });
    }

    /// One line per segment, the oldest first.
    #[must_use]
    pub fn lines(&self) -> Vec<String> {
        self.seen.iter().map(Seen::to_string).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::{Fate, KEPT, Recent, Towards};
    use std::time::Duration;

    /// A segment to port 80 that acknowledges byte 7, with a window of 65,535.
    fn segment(port: u16, seq: u32, payload: &[u8]) -> Vec<u8> {
        let length = u16::try_from(20 + 20 + payload.len()).expect("a short segment").to_be_bytes();
        let mut frame = vec![0; 12];
        frame.extend([8, 0, 0x45, 0, length[0], length[1], 0, 0, 0x40, 0, 64, 6, 0, 0]);
        frame.extend([10, 0, 0, 2, 169, 254, 169, 254]);
        frame.extend([&port.to_be_bytes()[..], &80_u16.to_be_bytes(), &seq.to_be_bytes()].concat());
        frame.extend([0, 0, 0, 7, 0x50, 0x10, 0xff, 0xff, 0, 0, 0, 0]);
        frame.extend(payload);
        frame
    }

    #[test]
    fn the_last_segments_are_kept_with_their_fates() {
        let mut recent = Recent::default();
        let fates = [Fate::Delivered, Fate::Lost, Fate::Refused];
        for number in 0..KEPT as u32 + 3 {
            let frame = segment(40_000, number, b"payload");
            let fate = fates[number as usize % 3];
            recent.note(Duration::from_millis(number.into()), Towards::Host, fate, &frame);
        }
        recent.note(Duration::ZERO, Towards::Guest, Fate::Lost, b"no segment");
        let lines = recent.lines();
        assert_eq!(lines.len(), KEPT);
        assert_eq!(lines[0], "0.003000 guest 40000>80 seq 3 ack 7 len 7 win 65535");
        assert!(lines[1].ends_with(" LOST") && lines[2].ends_with(" REFUSED"), "{lines:?}");
        let lost = (0..KEPT + 3).filter(|number| number % 3 == 1).count() + 1;
        assert_eq!(recent.lost, lost as u64);
    }
}
