//! The token buckets of a port, which keep one guest's flood from starving its neighbours.
//!
//! The buckets follow the generic cell rate algorithm (ITU-T I.371 annex A). A bucket does not count tokens;
//! it stores the time at which it will be full again. Each frame advances this time by the frame's cost. A
//! frame is refused if the new time would be later than now plus the bucket's depth. Each port has two
//! buckets: one for frames and one for new connections.

use crate::maps::{Edition, Port, RING_FRESH};

/// Takes one frame from the bucket at `now_ns`. Returns the time at which the bucket will be full again, or
/// `None` if the bucket holds too little.
///
/// A refused frame costs nothing. If `frame_ns` is 0, every frame is accepted. Two CPUs that read the same
/// state at once charge for one frame instead of two. A guest that spreads its frames over *n* queues is
/// therefore limited to at most *n* times its rate.
#[inline(always)]
#[must_use]
pub const fn take(port: Port, now_ns: u64) -> Option<u64> {
    charge(port.frame_ns, port.depth_ns, port.full_at_ns, now_ns)
}

/// Like [`take`], for one new connection.
#[inline(always)]
#[must_use]
pub const fn take_connection(port: Port, now_ns: u64) -> Option<u64> {
    charge(port.connection_ns, port.connection_depth_ns, port.connections_full_at_ns, now_ns)
}

/// Like [`take`], for one request that the kernel answers.
#[inline(always)]
#[must_use]
pub const fn take_request(edition: Edition, now_ns: u64) -> Option<u64> {
    charge(edition.request_ns, edition.depth_ns, edition.full_at_ns, now_ns)
}

/// True for a port that has sent more than [`RING_FRESH`] frames beyond its rate. Always false for a port
/// without a limit, because its bucket is not updated.
#[inline(always)]
#[must_use]
pub const fn is_spent(port: Port, now_ns: u64) -> bool {
    port.frame_ns != 0 && port.full_at_ns > now_ns.saturating_add(port.frame_ns.saturating_mul(RING_FRESH))
}

#[inline(always)]
const fn charge(cost_ns: u64, depth_ns: u64, full_at_ns: u64, now_ns: u64) -> Option<u64> {
    let start = if full_at_ns > now_ns { full_at_ns } else { now_ns };
    let full_again_ns = start.saturating_add(cost_ns);
    if cost_ns == 0 {
        Some(full_at_ns)
    } else if full_again_ns - now_ns <= depth_ns {
        Some(full_again_ns)
    } else {
        None
    }
}

/// The cost of one item in nanoseconds, and the depth of a bucket that holds `burst` items.
const fn cost(per_second: u32, burst: u32) -> (u64, u64) {
    const NANOS: u64 = 1_000_000_000;
    let cost_ns = match per_second {
        0 => 0,
        rate if rate as u64 > NANOS => 1,
        rate => NANOS / rate as u64,
    };
    let burst = if burst == 0 { 1 } else { burst as u64 };
    (cost_ns, cost_ns * burst)
}

impl Edition {
    /// The edition with a limit of `per_second` requests, of which `burst` may come at once. 0 a second means no limit.
    #[must_use]
    pub const fn with_limit(self, per_second: u32, burst: u32) -> Self {
        let (request_ns, depth_ns) = cost(per_second, burst);
        Self { request_ns, depth_ns, ..self }
    }
}

impl Port {
    /// A port with a full bucket that refills at `frames_per_second` and holds `burst` frames. New
    /// connections are not limited.
    ///
    /// A rate of 0 means no limit. A burst of 0 counts as 1. Rates above 10⁹ count as 10⁹.
    #[must_use]
    pub const fn with_limit(frames_per_second: u32, burst: u32) -> Self {
        let (frame_ns, depth_ns) = cost(frames_per_second, burst);
        Self {
            frame_ns,
            depth_ns,
            full_at_ns: 0,
            answers: 0,
            steered: 0,
            connection_ns: 0,
            connection_depth_ns: 0,
            connections_full_at_ns: 0,
            guarded: 0,
        }
    }

    /// Adds a full bucket for new connections. The arguments have the limits of [`Port::with_limit`].
    #[must_use]
    pub const fn and_connections(self, per_second: u32, burst: u32) -> Self {
        let (connection_ns, connection_depth_ns) = cost(per_second, burst);
        Self { connection_ns, connection_depth_ns, ..self }
    }

    /// A closed port, without limits.
    #[must_use]
    pub const fn closed() -> Self {
        Self { guarded: 1, ..Self::with_limit(0, 0) }
    }
}

#[cfg(test)]
mod tests {
    use super::{is_spent, take, take_connection};
    use crate::maps::{Port, RING_FRESH};

    #[test]
    fn a_port_is_spent_while_it_is_far_above_its_rate() {
        let mut port = Port::with_limit(1_000, 2_048);
        for _ in 0..RING_FRESH {
            port.full_at_ns = take(port, 0).expect("a token");
            assert!(!is_spent(port, 0));
        }
        port.full_at_ns = take(port, 0).expect("a token");
        assert!(is_spent(port, 0));
        assert!(!is_spent(port, 1_000_000), "after the time of one frame");
        let unlimited = Port { full_at_ns: u64::MAX, ..Port::with_limit(0, 1) };
        assert!(!is_spent(unlimited, 0));
        assert!(!is_spent(Port { full_at_ns: u64::MAX, ..port }, u64::MAX), "no overflow");
    }

    /// Offers one frame at each moment and returns how many were accepted.
    fn taken(port: &mut Port, moments: impl Iterator<Item = u64>) -> usize {
        moments
            .filter(|now| match take(*port, *now) {
                Some(full_at_ns) => {
                    port.full_at_ns = full_at_ns;
                    true
                }
                None => false,
            })
            .count()
    }

    #[test]
    fn a_full_bucket_accepts_exactly_one_burst() {
        let mut port = Port::with_limit(1_000, 8);
        assert_eq!(taken(&mut port, core::iter::repeat_n(5_000_000, 100)), 8);
    }

    #[test]
    fn an_empty_bucket_refills_at_its_rate() {
        let mut port = Port::with_limit(1_000, 8);
        taken(&mut port, core::iter::repeat_n(0, 100));
        assert_eq!(taken(&mut port, core::iter::once(999_999)), 0);
        assert_eq!(taken(&mut port, core::iter::repeat_n(1_000_000, 10)), 1);
        assert_eq!(taken(&mut port, core::iter::repeat_n(4_000_000, 10)), 3);
    }

    #[test]
    fn a_flood_is_limited_to_rate_and_burst() {
        let mut port = Port::with_limit(10_000, 2_048);
        // A million frames a second for one second.
        assert_eq!(taken(&mut port, (0..1_000_000).map(|us| us * 1_000)), 2_048 + 9_999);
    }

    #[test]
    fn an_idle_port_saves_no_more_than_the_depth() {
        let mut port = Port::with_limit(1_000, 8);
        taken(&mut port, core::iter::repeat_n(0, 8));
        assert_eq!(taken(&mut port, core::iter::repeat_n(u64::MAX / 2, 100)), 8);
    }

    #[test]
    fn no_rate_means_no_limit() {
        let mut port = Port::with_limit(0, 1);
        assert_eq!(taken(&mut port, core::iter::repeat_n(0, 10_000)), 10_000);
    }

    #[test]
    fn frames_and_connections_have_separate_buckets() {
        let mut port = Port::with_limit(1_000, 8).and_connections(100, 3);
        let opened = core::iter::repeat_n(0, 10).filter(|now| match take_connection(port, *now) {
            Some(full_at_ns) => {
                port.connections_full_at_ns = full_at_ns;
                true
            }
            None => false,
        });
        assert_eq!(opened.count(), 3);
        assert!(take_connection(port, 9_999_999).is_none() && take_connection(port, 10_000_000).is_some());
        assert_eq!(taken(&mut port, core::iter::repeat_n(0, 100)), 8);
        assert!(
            (0..1_000).all(|_| take_connection(Port::with_limit(1, 1), 0).is_some()),
            "no connection limit is set"
        );
    }

    #[test]
    fn the_largest_time_is_refused_instead_of_wrapping() {
        let port = Port { frame_ns: 1_000, depth_ns: 1_000, full_at_ns: u64::MAX, ..Port::default() };
        assert_eq!(take(port, 0), None);
        assert_eq!(take(port, u64::MAX), Some(u64::MAX));
    }

    #[test]
    fn extreme_limits_do_not_overflow() {
        assert_eq!(Port::with_limit(u32::MAX, u32::MAX).frame_ns, 1);
        assert_eq!(Port::with_limit(1, u32::MAX).depth_ns, u64::from(u32::MAX) * 1_000_000_000);
        assert_eq!(Port::with_limit(1, 0).depth_ns, 1_000_000_000);
    }
}
