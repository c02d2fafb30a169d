//! Telling a connection that is forgotten from one whose first segment is still under way.
//!
//! A segment that is not its connection's first, of a connection nobody holds, looks the same in either case. But a
//! guest whose first segment was lost sends that again before all others (RFC 6298 §5.4), and what overtook it at
//! most once more, as a probe of the tail (RFC 8985 §7). So what comes a third time is all the guest waits to have
//! acknowledged: its connection is gone, and the guest is told so (RFC 9293 §3.10.7.1), not left to its time-out.

use metadata_common::cookie::Flow;
use std::time::Duration;

/// Flows that are remembered, each in the one place its number says; a newer one takes it.
pub(super) const REMEMBERED: usize = 256;
/// How often a segment comes until its connection counts as forgotten.
pub(super) const TIMES: u8 = 3;
/// How long a segment is remembered after it came: guests wait a minute at most before they send again.
const MEMORY: Duration = Duration::from_secs(60);

#[derive(Clone, Copy)]
struct Heard {
    flow: u64,
    seq: u32,
    times: u8,
    last: Duration,
}

/// The last segments that came too early or too late.
pub(super) struct Forgotten([Option<Heard>; REMEMBERED]);

impl Forgotten {
    pub(super) fn new() -> Self {
        Self([None; REMEMBERED])
    }

    /// Takes note of a segment; true when it has come so often that nothing will come before it.
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
