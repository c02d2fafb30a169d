//! Distinguishes a forgotten connection from one whose first segment is still in transit.
//!
//! In both cases a segment arrives that is not its connection's first, and no agent holds the connection. A guest
//! whose first segment was lost retransmits that one before all others (RFC 6298 §5.4). It sends a later segment at
//! most once more, as a tail loss probe (RFC 8985 §7). A segment that arrives for the third time is therefore the
//! oldest unacknowledged one, and its connection is gone. The stack then sends a reset (RFC 9293 §3.10.7.1), so that
//! the guest need not wait for its timeout.

use metadata_common::cookie::Flow;
use std::time::Duration;

/// Limit of remembered flows. Each has one place, given by its number; a newer flow replaces an older one.
pub(super) const REMEMBERED: usize = 256;
/// Arrivals of a segment after which its connection counts as forgotten.
pub(super) const TIMES: u8 = 3;
/// How long a segment is remembered. Guests wait at most a minute before they retransmit.
const MEMORY: Duration = Duration::from_secs(60);

#[derive(Clone, Copy)]
struct Heard {
    flow: u64,
    seq: u32,
    times: u8,
    last: Duration,
}

/// The last segments that arrived too early or too late.
pub(super) struct Forgotten([Option<Heard>; REMEMBERED]);

impl Forgotten {
    pub(super) fn new() -> Self {
        Self([None; REMEMBERED])
    }

    /// Records a segment. Returns true if it has arrived so often that no earlier one will follow.
    pub(super) fn is_certain(&mut self, now: Duration, flow: Flow, seq: u32) -> bool {
        let flow = flow.number();
        let place = &mut self.0[flow as usize % REMEMBERED];
        let same = place.filter(|heard| heard.flow == flow && heard.seq == seq && now <= heard.last + MEMORY);
        let times = same.map_or(0, |heard| heard.times) + 1;
        let is_certain = times >= TIMES;
        *place = (!is_certain).then_some(Heard { flow, seq, times, last: now });
        is_certain
    }
}
