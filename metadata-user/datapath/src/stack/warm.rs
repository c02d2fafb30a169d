//! Reads ahead what the frames of a group will touch.
//!
//! In a boot storm each frame is another guest's, and nothing of that guest is in the CPU's cache. Its state lies behind
//! chains of pointers, and one frame after the other would wait for memory at each of them. Here each pointer is followed
//! for all frames of the group before the next one, so that their reads overlap.
//!
//! All of it is a hint: a wrong one costs time and nothing else.

use metadata_common::cookie::Flow;
use metadata_common::maps::Slot;
use std::hint::black_box;
use std::net::{IpAddr, Ipv4Addr};

use super::Stack;
use super::ledger::Ledger;
use super::seam::{Glimpse, Service};
use crate::link::GROUP;

/// Octets of a cache line of most CPUs.
const LINE: usize = 64;

/// A frame that shows nothing.
const NOTHING: Glimpse<'_> = Glimpse { slot: 0, local: (IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0), payload: &[] };

impl<S: Service, L: Ledger> Stack<S, L> {
    /// Reads ahead what [`receive`](Self::receive) will touch for these frames. Changes nothing.
    pub fn warm(&self, group: &[(Slot, &[u8])]) {
        if group.len() < 2 {
            return;
        }
        let group = &group[..group.len().min(GROUP)];
        let mut seen = 0;
        for (slot, frame) in group {
            seen ^= frame.iter().step_by(LINE).fold(0, |seen, octet| seen ^ octet);
            seen ^= u8::from(self.ports.get(*slot).is_some());
        }
        black_box(seen);
        let (mut glimpses, mut flows) = ([NOTHING; GROUP], [None; GROUP]);
        for ((slot, frame), place) in group.iter().zip(0..) {
            (glimpses[place], flows[place]) = self.glimpse(*slot, frame);
        }
        let glimpses = &glimpses[..group.len()];
        let (mut conns, mut oldest) = ([None; GROUP], [None; GROUP]);
        for (glimpse, place) in glimpses.iter().zip(0..) {
            let Some(port) = self.ports.get(glimpse.slot) else { continue };
            conns[place] = port.conns.last().copied();
            oldest[place] = port.waits.front().map(|(flow, _)| *flow);
        }
        for flow in flows.iter().flatten() {
            black_box(self.table.find(flow.number()));
            black_box(self.ledger.is_opened(*flow));
        }
        for flow in flows.iter().flatten().map(|flow| flow.number()).chain(oldest.into_iter().flatten()) {
            black_box(self.table.wait(flow));
        }
        let conns = conns.map(|at| self.table.get(at?));
        for conn in conns.iter().flatten() {
            black_box(conn.warm());
        }
        for conn in conns.iter().flatten() {
            black_box(self.ledger.look(conn.flow));
        }
        let (mut asking, mut count) = ([NOTHING; GROUP], 0);
        for glimpse in glimpses.iter().filter(|glimpse| !glimpse.payload.is_empty()) {
            asking[count] = *glimpse;
            count += 1;
        }
        self.service.warm(&asking[..count]);
    }

    /// Looks at a frame without checks.
    fn glimpse<'f>(&self, slot: Slot, frame: &'f [u8]) -> (Glimpse<'f>, Option<Flow>) {
        let nothing = Glimpse { slot, ..NOTHING };
        let Some(header) = frame.first_chunk::<47>() else { return (nothing, None) };
        if header[12..15] != [8, 0, 0x45] || header[23] != 6 {
            return (nothing, None);
        }
        let four = |at: usize| [header[at], header[at + 1], header[at + 2], header[at + 3]];
        let flow = Flow::v4(&self.config.cookie_key, slot, four(26), four(30), four(34));
        let payload = frame.get(34 + usize::from(header[46] >> 4) * 4..).unwrap_or_default();
        let local = (IpAddr::from(four(30)), u16::from_be_bytes([header[36], header[37]]));
        (Glimpse { slot, local, payload }, Some(flow))
    }
}
