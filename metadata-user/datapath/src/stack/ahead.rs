//! Reads ahead what the frames of a group will touch.
//!
//! In a boot storm each frame is another guest's, and nothing of that guest is in the CPU's cache. Its state lies behind
//! chains of pointers, and one frame after the other would wait for memory at each of them. Here each pointer is followed
//! for all frames of the group before the next one, so that their reads overlap.
//!
//! All of it is a hint: a wrong one costs time and nothing else.

use metadata_common::cookie::Flow;
use metadata_common::maps::Slot;
use metadata_common::wire::{ethernet, ipv4, ipv6, protocol, tcp};
use std::hint::black_box;
use std::net::{IpAddr, Ipv4Addr};

use super::Stack;
use super::ledger::Ledger;
use super::seam::{Glimpse, Service};
use super::segment::Tuple;
use crate::GROUP;

/// Octets of a cache line of most CPUs.
const LINE: usize = 64;

/// A look at a frame that shows nothing.
const NOTHING: Glimpse<'_> = Glimpse { slot: 0, local: (IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0), payload: &[] };

impl<S: Service, L: Ledger> Stack<S, L> {
    /// Reads ahead what [`receive`](Self::receive) will touch for these frames. Changes nothing.
    pub fn read_ahead(&self, group: &[(Slot, &[u8])]) {
        if group.len() < 2 {
            return;
        }
        let group = &group[..group.len().min(GROUP)];
        for (slot, frame) in group {
            black_box(frame.iter().step_by(LINE).fold(0, |seen, octet| seen ^ octet));
            black_box(self.ports.get(*slot).is_some());
        }
        let (mut glimpses, mut flows) = ([NOTHING; GROUP], [None; GROUP]);
        for ((slot, frame), place) in group.iter().zip(0..) {
            let seen = self.glimpse(*slot, frame);
            glimpses[place] = seen.map_or(Glimpse { slot: *slot, ..NOTHING }, |(glimpse, _)| glimpse);
            flows[place] = seen.map(|(_, flow)| flow);
        }
        let glimpses = &glimpses[..group.len()];
        self.read_ports(glimpses, &flows);
        let (mut asking, mut count) = ([NOTHING; GROUP], 0);
        for glimpse in glimpses.iter().filter(|glimpse| !glimpse.payload.is_empty()) {
            asking[count] = *glimpse;
            count += 1;
        }
        self.service.read_ahead(&asking[..count]);
    }

    /// Reads the entries of the frames' flows. For each port it also reads what the next request of a guest cleans up:
    /// its last connection, which the kernel has ended, and its oldest flow in TIME-WAIT.
    fn read_ports(&self, glimpses: &[Glimpse<'_>], flows: &[Option<Flow>]) {
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
        let numbers = flows.iter().flatten().map(|flow| flow.number());
        for number in numbers.chain(oldest.into_iter().flatten()) {
            black_box(self.table.wait(number));
        }
        let conns = conns.map(|at| self.table.get(at?));
        for conn in conns.iter().flatten() {
            black_box(conn.touch());
        }
        for conn in conns.iter().flatten() {
            black_box(self.ledger.look(conn.flow));
        }
    }

    /// Looks at a frame without checks. `None` unless it looks like a TCP segment without IP options or extensions.
    fn glimpse<'f>(&self, slot: Slot, frame: &'f [u8]) -> Option<(Glimpse<'f>, Flow)> {
        let packet = frame.get(ethernet::HEADER..)?;
        let (remote, local, segment): (IpAddr, IpAddr, _) = match packet.first()? {
            &ipv4::VERSION_IHL if packet.get(ipv4::PROTOCOL)? == &protocol::TCP => {
                let address = |at| array::<4>(packet, at);
                (
                    address(ipv4::SOURCE)?.into(),
                    address(ipv4::DESTINATION)?.into(),
                    packet.get(ipv4::HEADER..)?,
                )
            }
            _ if packet.get(ipv6::NEXT_HEADER)? == &protocol::TCP => {
                let address = |at| array::<16>(packet, at);
                (
                    address(ipv6::SOURCE)?.into(),
                    address(ipv6::DESTINATION)?.into(),
                    packet.get(ipv6::HEADER..)?,
                )
            }
            _ => return None,
        };
        let port = |at| array(segment, at).map(u16::from_be_bytes);
        let (remote, local) = ((remote, port(0)?), (local, port(2)?));
        let flow = Tuple { remote, local }.flow(&self.config.cookie_key, slot);
        // The octet before the flags has the length of the header in words of four octets (RFC 9293 §3.1).
        let header = usize::from(segment.get(tcp::FLAGS - 1)? >> 4) * 4;
        let payload = segment.get(header..).unwrap_or_default();
        Some((Glimpse { slot, local, payload }, flow))
    }
}

/// The octets at a place.
fn array<const N: usize>(octets: &[u8], at: usize) -> Option<[u8; N]> {
    octets.get(at..)?.first_chunk().copied()
}
