//! A pretended kernel before the stack: it answers SYNs, and hears acknowledgements and FINs in its place.
//!
//! Only frames with nothing unusual in them are taken, as in the kernel; everything else is the stack's.

use metadata_common::cookie::{Abilities, Flow, Key, issue};
use metadata_common::mac::Mac;
use metadata_common::maps::{AllSent, FIN_ENDS_BOTH, FIN_IS_NEWS, Slot};
use metadata_user::stack::{Displaced, Heard, Ledger, Transmit};
use smoltcp::wire::{Ipv4Packet, TcpControl, TcpPacket};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};

use crate::raw::Segment;

/// The table both sides write to.
#[derive(Clone, Debug)]
pub struct Board(Arc<Mutex<Vec<AllSent>>>);

/// The kernel's side of it.
#[derive(Clone)]
pub struct Kernel {
    board: Board,
    key: Key,
    /// SYNs answered, acknowledgements heard, FINs answered.
    pub taken: [u64; 3],
}

impl Board {
    /// A table with room for so many flows; those with the same place take turns.
    #[must_use]
    pub fn new(places: usize) -> Self {
        Self(Arc::new(Mutex::new(vec![AllSent::default(); places])))
    }

    fn with<T>(&self, place: u32, f: impl FnOnce(&mut AllSent) -> T) -> T {
        let mut entries = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let places = entries.len();
        f(&mut entries[place as usize % places])
    }

    /// The entries of connections.
    #[must_use]
    pub fn entries(&self) -> Vec<AllSent> {
        let entries = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        entries.iter().copied().filter(|entry| entry.flow != 0).collect()
    }

    /// Changes every entry of a connection.
    pub fn spoil(&self, f: impl Fn(&mut AllSent)) {
        let mut entries = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        entries.iter_mut().filter(|entry| entry.flow != 0).for_each(f);
    }
}

impl Ledger for Board {
    fn post(&mut self, flow: Flow, entry: AllSent) -> Option<Displaced> {
        self.with(flow.index(), |place| {
            let AllSent { flow: before, acknowledged, closed, .. } = std::mem::replace(place, entry);
            let displaced = Displaced { flow: before, heard: Heard { acknowledged, closed } };
            (before != 0 && before != entry.flow).then_some(displaced)
        })
    }

    fn look(&self, flow: Flow) -> Option<Heard> {
        self.with(flow.index(), |place| {
            let heard = Heard { acknowledged: place.acknowledged, closed: place.closed };
            (place.flow == flow.number()).then_some(heard)
        })
    }

    fn withdraw(&mut self, flow: Flow) {
        self.with(flow.index(), |place| {
            if place.flow == flow.number() {
                *place = AllSent::default();
            }
        });
    }
}

impl Kernel {
    /// A kernel that shares this table and key with a stack.
    #[must_use]
    pub fn new(board: Board, key: Key) -> Self {
        Self { board, key, taken: [0; 3] }
    }

    /// Takes a frame, if it is one the stack need not see.
    pub fn takes(&mut self, slot: Slot, frame: &[u8], out: &mut dyn Transmit) -> bool {
        if frame.len() < 54 || frame[12..14] != [8, 0] || frame[14] != 0x45 || frame[23] != 6 {
            return false;
        }
        let Ok(ip) = Ipv4Packet::new_checked(&frame[14..]) else { return false };
        let Ok(tcp) = TcpPacket::new_checked(ip.payload()) else { return false };
        let (guest, local) = (ip.src_addr(), ip.dst_addr());
        let ports: [u8; 4] = ip.payload()[..4].try_into().expect("four octets");
        let flow = Flow::v4(&self.key, slot, guest.octets(), local.octets(), ports);
        let (seq, ack) = (tcp.seq_number().0 as u32, tcp.ack_number().0 as u32);
        let answer = |control, seq, ack, window| Segment {
            to: Mac(frame[6..12].try_into().expect("six octets")),
            source: (IpAddr::V4(local), tcp.dst_port()),
            destination: (IpAddr::V4(guest), tcp.src_port()),
            control,
            seq,
            ack: Some(ack),
            window,
            mss: (control == TcpControl::Syn).then_some(1460),
            payload: Vec::new(),
        };
        match frame[47] & 0x1f {
            0x02 => {
                // Without the window scale, which the answer does not offer either.
                let said = Abilities { segment: 536, scale: None };
                let number = issue(&self.key, flow, seq, said);
                out.send(&answer(TcpControl::Syn, number, seq.wrapping_add(1), 3072).frame(slot));
                self.taken[0] += 1;
                true
            }
            0x10 | 0x11 if tcp.payload().is_empty() => {
                let ends = frame[47] & 1 == 1;
                let heard = self.board.with(flow.index(), |entry| {
                    let is_it = entry.flow == flow.number() && (entry.sent, entry.received) == (ack, seq);
                    let both = entry.finished == FIN_ENDS_BOTH;
                    let last = (ack.wrapping_sub(1), seq.wrapping_sub(1)) == (entry.sent, entry.received);
                    if entry.flow == flow.number() && both && !ends && entry.closed == entry.sent && last {
                        return Some((false, 0));
                    }
                    (is_it && (!ends || entry.finished != FIN_IS_NEWS)).then(|| {
                        entry.acknowledged = ack;
                        if ends {
                            entry.closed = ack;
                        }
                        (both, entry.window as u16)
                    })
                });
                self.taken[1 + usize::from(ends)] += u64::from(heard.is_some());
                if let Some((both, window)) = heard.filter(|_| ends) {
                    let control = if both { TcpControl::Fin } else { TcpControl::None };
                    out.send(&answer(control, ack, seq.wrapping_add(1), window).frame(slot));
                }
                heard.is_some()
            }
            _ => false,
        }
    }
}
